"""The package that starts executors of a program: found by its entry point, and what is said where it cannot be used."""

from __future__ import annotations

import functools
import importlib
import types

import pytest

from djinn_core.errors import StartupError
from djinn_core.registry import embedded_executors
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.embedded_executors import GROUP, check_starter, find_starter
from djinn_core.registry.kinds import CLIENT_KINDS
from djinn_core.registry.registry import survey
from djinn_core.registry.selection import Selection


def installed(monkeypatch, *points):
    found = [
        types.SimpleNamespace(
            dist=types.SimpleNamespace(name=distribution, version="26.11.0"),
            load=functools.partial(importlib.import_module, value),
        )
        for distribution, value in points
    ]
    monkeypatch.setattr(embedded_executors, "entry_points", lambda group: found if group == GROUP else ())


def test_installed_server_package_starts_executors():
    assert callable(find_starter().start)
    check_starter()


def test_without_server_package_the_error_names_how_to_install_it(monkeypatch):
    installed(monkeypatch)
    check_starter()  # a client needs none
    with pytest.raises(StartupError, match=r"djinn-server.*pip install \./djinn_server.*djinn\.configure\(servers="):
        find_starter()


def test_server_package_that_cannot_be_imported_is_named(monkeypatch, tmp_path):
    (tmp_path / "broken_starter.py").write_text("def (")
    monkeypatch.syspath_prepend(tmp_path)
    installed(monkeypatch, ("djinn-server", "broken_starter"))
    for ask in (find_starter, check_starter):
        with pytest.raises(StartupError, match=r"djinn-server 26\.11\.0.*cannot be imported \(SyntaxError"):
            ask()


def test_two_packages_that_start_executors_are_both_named(monkeypatch):
    installed(monkeypatch, ("djinn-server", "djinn_server.launch.embedded"), ("other", "other.executors"))
    with pytest.raises(StartupError, match=r"djinn-server and other both start executors"):
        find_starter()


def test_client_uses_no_built_in_plugin_of_the_server():
    points = builtin_plugins().values()
    kinds = {point.group.removeprefix("djinn.") for point in points if point.module.startswith("djinn_server")}
    assert kinds
    assert not kinds & CLIENT_KINDS


def test_built_in_plugin_that_cannot_be_imported_is_a_failed_row():
    registry, _ = survey(Selection(), builtins={"broken": "no_such_module_of_djinn"})
    (row,) = [row for row in registry.rows if row.name == "broken"]
    assert row.status == "failed"
    assert "no_such_module_of_djinn" in (row.error or "")
