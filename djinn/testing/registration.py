"""Conformance suite for whole plugins: they are discovered, they load, and their hooks return the documented types."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from djinn.testing.suite import Ending, missing
from djinn_core.hookspecs import API_VERSION
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import Registry, load_registry
from djinn_core.registry.selection import Selection


class PluginConformance(Ending):
    """Tests that every plugin must pass.

    Subclass this class and define the fixture `plugin`, which returns your plugin's module, object or name.
    """

    @pytest.fixture
    def plugin(self) -> object:
        """Return the plugin under test."""
        return missing(self, "plugin", "your plugin's module, object or name")

    @pytest.fixture
    def registry(self, plugin: object) -> Registry:
        """Return all registered objects of this plugin and the built-in plugins."""
        return load_registry(Selection(plugins=(plugin,)), builtins=builtin_plugins(), entry_points=None)

    def test_plugin_loads(self, registry: Registry) -> None:
        """The plugin loads, declares the present plugin API version, and its hooks return the documented types."""
        active = [row for row in registry.rows if row.status == "active" and row.distribution != "djinn"]
        assert len(active) == 1, f"expected one active plugin, got {active}"
        assert active[0].kind, "the plugin implements no hook"

    def test_every_hook_has_an_entry_point(self, registry: Registry) -> None:
        """An installed plugin module has an entry point for each kind of object that it registers."""
        kinds: dict[str, set[str]] = {}
        entries = entry_points()
        for group in entries.groups:
            package, kind, *_ = (*group.split("."), "")  # such as `djinn.integrations.torchvision`
            for point in entries.select(group=group) if package == "djinn" else ():
                kinds.setdefault(point.value, set()).add(kind)
        for row in registry.rows:
            groups = kinds.get(row.name)
            lacking = set(row.kind.split(",")) - groups if groups else ()
            assert not lacking, f"{row.name} has no entry point in the group 'djinn.{min(lacking)}'"

    def test_hooks_are_repeatable(self, plugin: object) -> None:
        """Each call of a hook returns the same number of objects, because a process may load plugins several times."""
        first, second = (load_registry(Selection(plugins=(plugin,)), builtins={}).owners.keys() for _ in range(2))
        assert set(first) == set(second)
        assert first, f"the plugin registers nothing: check that it is written for plugin API version {API_VERSION}"
