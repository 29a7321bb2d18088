"""The package that starts executors of a program: found by its name, and what is said where it cannot be used."""

from __future__ import annotations

import pytest

from djinn_core.errors import StartupError
from djinn_core.registry import embedded_executors
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.embedded_executors import check_starter, find_starter
from djinn_core.registry.kinds import CLIENT_KINDS
from djinn_core.registry.registry import survey
from djinn_core.registry.selection import Selection


def test_installed_server_package_starts_executors():
    assert callable(find_starter().start)
    check_starter()


def test_missing_server_package_is_named(monkeypatch):
    monkeypatch.setattr(embedded_executors, "STARTER", "no_such_package.embedded")
    check_starter()  # a client needs none
    with pytest.raises(StartupError, match=r"djinn-server.*pip install \./djinn_server.*djinn\.configure\(servers="):
        find_starter()


def test_broken_server_package_is_named(monkeypatch, tmp_path):
    (tmp_path / "broken_server").mkdir()
    (tmp_path / "broken_server" / "embedded.py").write_text("def (")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(embedded_executors, "STARTER", "broken_server.embedded")
    for ask in (find_starter, check_starter):
        with pytest.raises(StartupError, match=r"djinn-server.*cannot be imported \(SyntaxError"):
            ask()


def test_client_uses_no_built_in_plugin_of_the_server():
    points = builtin_plugins().values()
    kinds = {point.group.removeprefix("djinn.") for point in points if point.module.startswith("djinn_server")}
    assert kinds
    assert not kinds & CLIENT_KINDS


def test_broken_built_in_plugin_is_a_failed_row():
    registry, _ = survey(Selection(), builtins={"broken": "no_such_module_of_djinn"})
    (row,) = [row for row in registry.rows if row.name == "broken"]
    assert row.status == "failed"
    assert "no_such_module_of_djinn" in (row.error or "")
