"""The package that starts executors of a program: found by its entry point, and what is said where it cannot be used."""

from __future__ import annotations

import pytest

from djinn_core.errors import StartupError
from djinn_core.registry import embedded_executors
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.embedded_executors import GROUP, check_starter, find_starter
from djinn_core.registry.entry_points import DiscoveredEntryPoint
from djinn_core.registry.kinds import CLIENT_KINDS
from djinn_core.registry.registry import Selection, survey


def installed(monkeypatch, *points):
    found = [DiscoveredEntryPoint(GROUP, "local", value, distribution, "26.11.0") for distribution, value in points]
    monkeypatch.setattr(embedded_executors, "installed_points", lambda: (("/folder", tuple(found)),))


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
    assert not [module for module in builtin_plugins(CLIENT_KINDS).values() if module.startswith("djinn_server")]


def test_built_in_plugin_that_cannot_be_imported_is_a_failed_row():
    rows = survey(Selection(), builtins={"broken": "no_such_module_of_djinn"}).registry.rows
    (row,) = [row for row in rows if row.name == "broken"]
    assert row.status == "failed"
    assert "no_such_module_of_djinn" in (row.error or "")
