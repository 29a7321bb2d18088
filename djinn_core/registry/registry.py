"""The registry: the objects of all plugins in use, in call order."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from djinn_core.errors import PluginError
from djinn_core.registry.discovery import PluginCandidate, built_in, choices, installed, named
from djinn_core.registry.kinds import EVERY_KIND, KINDS
from djinn_core.registry.loading import PluginFailure, PluginLoader
from djinn_core.registry.report import PluginRow, log
from djinn_core.registry.selection import Selection
from djinn_core.registry.settings import is_given_to, warn_of_unknown_plugins
from djinn_core.settings import PluginSetting, SettingRow

if TYPE_CHECKING:  # lists commands without importing PyTorch
    from click import Command

    from djinn_core.hookspecs.cost_models import CostModel
    from djinn_core.hookspecs.observers import Observer
    from djinn_core.hookspecs.operators import OperatorLibrary
    from djinn_core.hookspecs.optimizations import Optimization
    from djinn_core.hookspecs.patterns import Pattern
    from djinn_core.hookspecs.placement_policies import PlacementPolicy
    from djinn_core.hookspecs.schedulers import Scheduler
    from djinn_core.hookspecs.transports import Transport


class Registry:
    """The objects that plugins registered, each tuple in the order that the docstring of its hook promises.

    A kind is loaded when its objects are first requested, by any thread. Objects given to the constructor replace the
    objects of plugins. Only the core's kinds are annotated here, not those of the client's and the server's packages.
    """

    operators: tuple[OperatorLibrary, ...]
    patterns: tuple[Pattern, ...]
    cost_models: tuple[CostModel, ...]
    optimizations: tuple[Optimization, ...]
    placement_policies: tuple[PlacementPolicy, ...]
    schedulers: tuple[Scheduler, ...]
    transports: tuple[Transport, ...]
    observers: tuple[Observer, ...]
    commands: tuple[Command, ...]

    def __init__(
        self,
        loader: PluginLoader | None = None,
        owners: Mapping[tuple[str, str], PluginRow] | None = None,
        is_survey: bool = False,
        **objects: tuple[Any, ...],
    ) -> None:
        """Create a registry with the given objects. Other kinds are loaded on demand.

        Args:
            loader: loader of the plugins, or None for no plugins.
            owners: rows of the given objects, by kind and name.
            is_survey: True if failed plugins cause no warning.
            objects: objects by kind, which replace the objects of plugins.
        """
        self._loader, self._owners = loader, dict(owners or {})
        self._is_survey = is_survey
        vars(self).update(objects)

    def __getattr__(self, name: str) -> tuple[Any, ...]:
        """Return the objects of a kind. Load them at the first request.

        Raises:
            PluginError: a plugin that the user named, or that is built in, cannot be used.
        """
        if name not in EVERY_KIND:
            raise AttributeError(f"there is no plugin kind {name!r}")
        self.load(name)
        plugins: tuple[Any, ...] = vars(self)[name]
        return plugins

    def load(self, *kinds: str) -> None:
        """Load objects of some kinds, and warn of plugins that cannot be used.

        Raises:
            PluginError: a plugin that the user named, or that is built in, cannot be used. If the selection is strict:
                any plugin.
        """
        loader = self._loader
        for kind in kinds:
            if kind not in vars(self):
                vars(self)[kind] = loader.load(kind) if loader is not None else ()
        if loader is not None and not self._is_survey:
            loader.report_failures()

    def has_loaded(self, kinds: Iterable[str]) -> bool:
        """Return True if `load` has loaded these kinds."""
        return all(kind in vars(self) for kind in kinds)

    def evolve(self, **objects: tuple[Any, ...]) -> Registry:
        """Return a copy of the registry with replaced objects for some kinds."""
        loaded = {kind: plugins for kind, plugins in vars(self).items() if kind in EVERY_KIND}
        return Registry(self._loader, self._owners, self._is_survey, **{**loaded, **objects})

    @property
    def rows(self) -> tuple[PluginRow, ...]:
        """Return the status of each plugin so far. A plugin whose kinds are not loaded yet is `active`."""
        return tuple(plugin.row for plugin in self._loader.plugins) if self._loader is not None else ()

    @property
    def plugin_settings(self) -> tuple[SettingRow, ...]:
        """Return the settings of loaded plugins, each with the origin of its value."""
        plugins = self._loader.plugins if self._loader is not None else ()
        return tuple(row for plugin in plugins for settings in plugin.settings.values() for row in settings.rows)

    @property
    def is_selected(self) -> bool:
        """Return True if the settings select or configure plugins."""
        return self._loader is not None and self._loader.selection != Selection()

    def settings_given_to(self, plugins: Collection[str]) -> frozenset[PluginSetting]:
        """Return the plugin settings in the selection that belong to `plugins`."""
        settings = self._loader.selection.plugin_settings if self._loader is not None else ()
        names = [row.name for row in self.rows]
        return frozenset(
            setting for setting in settings if any(is_given_to(setting, plugin, names) for plugin in plugins)
        )

    def used_in(self, kinds: Collection[str], names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Return `names` without the active plugins that have no hook of `kinds`. None, which means all, stays None."""
        unused = {row.name for row in self.rows if row.status == "active" and not {*row.kind.split(",")} & {*kinds}}
        return None if names is None else tuple(name for name in names if name not in unused)

    @property
    def owners(self) -> Mapping[tuple[str, str], PluginRow]:
        """Return the rows of the plugins by kind and name of their objects."""
        plugins = self._loader.owners if self._loader is not None else {}
        return {**{key: plugin.row for key, plugin in plugins.items()}, **self._owners}

    def owner(self, kind: str, name: str) -> str:
        """Return the plugin that registered object `name` of a kind, as named in messages."""
        row = self.owners.get((kind, name))
        return row.label if row is not None else "no plugin"


def open_registry(
    selection: Selection,
    *,
    builtins: Mapping[str, object],
    kinds: Collection[str],
    entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
    started: bool = False,
) -> Registry:
    """Return a registry of the selected plugins. Their kinds are loaded on demand.

    Plugins that the selection names or configures are loaded now. If the selection is strict, all are loaded now. Calls
    share no state, so threads and plugin hooks may call it at any time. A discovered plugin that cannot be used becomes
    a row and one warning.

    Args:
        selection: the selected plugins.
        builtins: the built-in plugins by name: entry points or plugin objects.
        kinds: names of the kinds whose hooks are called in this process.
        entry_points: entry points to use instead of the entry points of all installed distributions.
        started: True if the parent process has warned of failures that both see. Then only failed hooks cause a
            warning.

    Raises:
        ConfigurationError: a setting of a plugin that is loaded now is malformed.
        PluginError: a plugin that the user named, or a built-in plugin, cannot be found or used. If the selection is
            strict: any plugin.
    """
    loader = _loader(selection, builtins, kinds, entry_points, started=started)
    registry = Registry(loader)
    at_once = loader.kinds_to_load_now()
    registry.load(*[kind.name for kind in KINDS if kind.name in at_once])
    return registry


def load_registry(
    selection: Selection,
    *,
    builtins: Mapping[str, object],
    entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
    kinds: Collection[str] = EVERY_KIND,
    started: bool = False,
) -> Registry:
    """Return a registry of the selected plugins, with all kinds loaded."""
    registry = open_registry(selection, builtins=builtins, entry_points=entry_points, kinds=kinds, started=started)
    registry.load(*[kind.name for kind in KINDS if kind.name in kinds])
    return registry


def survey(
    selection: Selection,
    *,
    builtins: Mapping[str, object],
    entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
) -> tuple[Registry, tuple[PluginFailure, ...]]:
    """Return a registry with all kinds of the selected plugins, and the failures. Failed plugins raise no error."""
    loader = _loader(selection, builtins, EVERY_KIND, entry_points, libraries=True)
    for kind in KINDS:
        loader.load(kind.name)
    return Registry(loader, is_survey=True), tuple(loader.failures)


def _loader(
    selection: Selection,
    builtins: Mapping[str, object],
    kinds: Collection[str],
    entry_points: Iterable[importlib.metadata.EntryPoint] | None,
    *,
    started: bool = False,
    libraries: bool = False,
) -> PluginLoader:
    """Return a loader with the plugins of a selection. Plugins without entry points are imported now."""
    builtin, offered = built_in(builtins), installed(entry_points)
    loader = PluginLoader(selection, kinds, started=started, libraries=libraries)
    for candidate in builtin:
        loader.take(candidate)
    if selection.plugins is None:
        for candidate in offered:
            loader.take(candidate)
    else:
        _take_requested(loader, selection.plugins, builtin, offered)
    if not started:
        names = {candidate.name for candidate in (*builtin, *offered)} | {
            plugin.candidate.name for plugin in loader.plugins
        }
        warn_of_unknown_plugins(selection.plugin_settings, names)
        for unknown in sorted(selection.disable - names):
            error = f"{unknown!r}{choices(unknown, (*builtin, *offered))}"
            log().warning("the setting `disable` names an unknown plugin", plugin=unknown, error=error)
    return loader


def _take_requested(
    loader: PluginLoader,
    requests: tuple[object, ...],
    builtin: tuple[PluginCandidate, ...],
    offered: tuple[PluginCandidate, ...],
) -> None:
    candidates: list[PluginCandidate] = []
    for request in {request if isinstance(request, str) else id(request): request for request in requests}.values():
        try:
            candidates.append(named(request, (*builtin, *offered)))
        except PluginError as error:
            loader.refuse(PluginCandidate(str(request)), error)
    unselected = [candidate for candidate in offered if candidate not in candidates]
    for candidate in sorted((*candidates, *unselected), key=lambda candidate: candidate.name):
        if candidate in unselected:
            loader.take(candidate, unselected=True)
        elif candidate not in builtin:
            loader.take(candidate, requested=True)
