"""A client loads the plugins that it begins a session with, and the others when a program is planned."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from djinn_client.runtime.load_plugins import all_plugins, load_opening_plugins, load_plugins
from djinn_core.registry import intake
from djinn_core.registry.registry import Registry
from djinn_core.settings import Settings

Install = Callable[..., None]
OBSERVER = """
from djinn.hooks import Observer, hookimpl
djinn_api_version = 1
class Watching(Observer):
    name = "watching"
    def observe(self, event):
        pass
@hookimpl
def djinn_register_observers():
    return [Watching()]
"""
BROKEN_LATER = """
from djinn_core.hookspecs import hookimpl
djinn_api_version = 1
@hookimpl
def djinn_register_patterns():
    raise ValueError("no patterns today")
"""


@pytest.fixture
def loaded(install: Install, pattern: Callable[[str], str], tmp_path_factory, monkeypatch) -> list[str]:
    """Names of plugins that were imported, from a second process on: the kinds of all that are installed were kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    install("zebra", pattern("zebra"))
    install("watching", OBSERVER)
    install("never", "raise ImportError('it is broken')")
    install("later", BROKEN_LATER)
    load_opening_plugins(Settings())
    names: list[str] = []
    load = intake.load

    def noting(candidate, *given):
        names.append(candidate.name)
        return load(candidate, *given)

    monkeypatch.setattr(intake, "load", noting)
    return names


def status(registry: Registry) -> dict[str, str]:
    return {row.name: row.status for row in registry.rows if not row.name.startswith("_")}


def test_a_session_begins_with_the_plugins_that_it_asks_first(loaded):
    opening = load_opening_plugins(Settings())
    assert {"watching", "tcp", "never"} <= set(loaded)
    assert not {"zebra", "attention", "roofline"} & set(loaded)
    assert [one.name for one in opening.observers if one.name == "watching"]
    assert opening.patterns == ()
    assert status(opening)["zebra"] == "active"
    assert status(opening)["never"] == "failed"


def test_the_others_come_later_and_what_is_in_use_stays(loaded):
    opening = load_opening_plugins(Settings())
    loaded.clear()
    every = all_plugins(Settings(), opening)
    assert {"zebra", "attention"} <= set(loaded)
    assert "never" not in loaded, "it failed before"
    assert all(a is b for a, b in zip(every.observers, opening.observers, strict=True))
    assert every.transports == opening.transports
    at_once = load_plugins(Settings())
    assert status(every) == status(at_once)
    assert status(every)["later"] == "failed"
    assert [one.name for one in every.patterns] == [one.name for one in at_once.patterns]
    assert every.owner("observers", "watching") == at_once.owner("observers", "watching")
    assert all_plugins(Settings(), every) is every


@pytest.mark.parametrize(
    "settings",
    [{"disable": ("attention",)}, {"plugins": ("tcp", "zebra")}, {"strict": False, "engine": "ray"}],
    ids=str,
)
def test_settings_about_plugins_load_all_that_they_select(loaded, settings):
    registry = load_opening_plugins(Settings(**settings))
    assert "zebra" in loaded
    assert not registry.later
    assert "zebra" in {one.name for one in registry.patterns}


def test_nothing_is_warned_of_twice(loaded, monkeypatch):
    warned: list[str] = []
    monkeypatch.setattr(intake.PluginFailure, "warn", lambda failure: warned.append(failure.row.name))
    all_plugins(Settings(), load_opening_plugins(Settings()))
    assert sorted(name for name in warned if name in {"never", "later"}) == ["later", "never"]
    assert "plugin_djinn_never" not in sys.modules
