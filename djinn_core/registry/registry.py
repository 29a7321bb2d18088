"""The registry: the objects of all plugins in use, in the order in which the core asks them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from djinn_core.errors import PluginError
from djinn_core.registry.discovery import PluginCandidate, built_in, choices, installed, named
from djinn_core.registry.intake import PluginFailure, PluginLoader, warn_of_hooks
from djinn_core.registry.kinds import EVERY_KIND, INTEGRATIONS, KINDS
from djinn_core.registry.kinds_cache import KindsCache
from djinn_core.registry.report import PluginRow, log
from djinn_core.registry.settings import unknown_settings
from djinn_core.settings import PluginSetting, SettingRow, Settings

if TYPE_CHECKING:  # to list commands, none of PyTorch is imported
    from click import Command

    from djinn_core.hookspecs.api_names import ApiName
    from djinn_core.hookspecs.assignment_policies import AssignmentPolicy
    from djinn_core.hookspecs.authenticators import Authenticator
    from djinn_core.hookspecs.compilers import Compiler
    from djinn_core.hookspecs.cost_models import CostModel
    from djinn_core.hookspecs.devices import Device
    from djinn_core.hookspecs.executors import ExecutorEngine
    from djinn_core.hookspecs.integrations import Integration
    from djinn_core.hookspecs.interceptors import Interceptor
    from djinn_core.hookspecs.memory_policies import MemoryPolicy
    from djinn_core.hookspecs.observers import Observer
    from djinn_core.hookspecs.operations_pages import OperationsPages
    from djinn_core.hookspecs.optimizations import Optimization
    from djinn_core.hookspecs.patterns import Pattern
    from djinn_core.hookspecs.placement_policies import PlacementPolicy
    from djinn_core.hookspecs.renderers import Renderer
    from djinn_core.hookspecs.schedulers import ScheduleMaker
    from djinn_core.hookspecs.transports import Transport
    from djinn_core.hookspecs.weight_formats import WeightFormat
    from djinn_core.hookspecs.weight_sources import WeightSource


class Selection(msgspec.Struct, frozen=True):
    """Selection of plugins.

    Attributes:
        plugins: names, importable module names, modules or objects, used beside the built-in plugins; None: everything
            that is installed.
        disable: names of plugins not to use, built-in ones included.
        strict: whether a broken plugin is an error rather than a warning.
        trace: whether each call of a hook is logged.
        plugin_settings: as in the settings.
    """

    plugins: tuple[Any, ...] | None = None
    disable: frozenset[str] = frozenset()
    strict: bool = False
    trace: bool = False
    plugin_settings: tuple[PluginSetting, ...] = ()

    @classmethod
    def from_settings(cls, settings: Settings) -> Selection:
        """Selection by the settings `plugins`, `disable`, `strict`, `trace_plugins` and `plugin_settings`."""
        names = frozenset(settings.disable)
        return cls(settings.plugins, names, settings.strict, settings.trace_plugins, settings.plugin_settings)

    def sendable(self) -> Selection:
        """The same with values of settings that JSON can hold."""
        return msgspec.structs.replace(self, plugin_settings=tuple(given.sendable() for given in self.plugin_settings))


@attrs.frozen
class Registry:
    """The objects that plugins registered, each tuple in the order that the docstring of its hook promises.

    Attributes:
        rows: what became of each plugin, the unusable ones included.
        owners: by kind of object (`patterns`) and name the row of the plugin that it came from.
        plugin_settings: the settings that plugins in use have of their own, each with where its value came from.
        later: names of kinds whose objects are not here yet; see `load_opening`.
    """

    interceptors: tuple[Interceptor, ...] = ()
    integrations: tuple[Integration, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    cost_models: tuple[CostModel, ...] = ()
    optimizations: tuple[Optimization, ...] = ()
    placement_policies: tuple[PlacementPolicy, ...] = ()
    schedulers: tuple[ScheduleMaker, ...] = ()
    transports: tuple[Transport, ...] = ()
    executors: tuple[ExecutorEngine, ...] = ()
    devices: tuple[Device, ...] = ()
    compilers: tuple[Compiler, ...] = ()
    memory_policies: tuple[MemoryPolicy, ...] = ()
    weight_sources: tuple[WeightSource, ...] = ()
    weight_formats: tuple[WeightFormat, ...] = ()
    authenticators: tuple[Authenticator, ...] = ()
    assignment_policies: tuple[AssignmentPolicy, ...] = ()
    operations_pages: tuple[OperationsPages, ...] = ()
    observers: tuple[Observer, ...] = ()
    renderers: tuple[Renderer, ...] = ()
    api_names: tuple[ApiName, ...] = ()
    commands: tuple[Command, ...] = ()
    rows: tuple[PluginRow, ...] = ()
    owners: Mapping[tuple[str, str], PluginRow] = attrs.field(factory=dict)
    plugin_settings: tuple[SettingRow, ...] = ()
    later: frozenset[str] = frozenset()

    def used_in(self, kinds: Collection[str], names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Those names of plugins without which a process that uses objects of `kinds` would lack something; None stays None."""
        others = {row.name for row in self.rows if row.status == "active" and not {*row.kind.split(",")} & {*kinds}}
        return None if names is None else tuple(name for name in names if name not in others)

    def owner(self, objects: str, name: str) -> str:
        """The plugin that registered object `name` among `objects` (a field of this class), as messages name it."""
        row = self.owners.get((objects, name))
        return row.label if row else "no plugin"


class LoadReport(msgspec.Struct, frozen=True):
    """The registry that can be had, and what stands in the way of more."""

    registry: Registry
    failures: tuple[PluginFailure, ...]
    unknown_settings: Mapping[str, str] = msgspec.field(
        default_factory=dict
    )  # given to no plugin's setting, and what was probably meant

    def usable(self, strict: bool) -> Registry:
        """The registry, unless a failure is fatal or `strict` makes it so.

        Raises:
            PluginError: the first such failure.
        """
        for failure in self.failures:
            if failure.fatal or strict:
                raise failure.error
        return self.registry


def load_registry(
    selection: Selection,
    *,
    builtins: Mapping[str, object],
    entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
    kinds: Collection[str] = EVERY_KIND,
) -> Registry:
    """Load the selected plugins and call their hooks of the given kinds.

    Every call starts afresh and touches nothing that is shared, so threads may call it at the same time, and a plugin
    from within its hooks. A discovered plugin that cannot be used becomes a row and one warning.

    Args:
        selection: which plugins.
        builtins: the plugins that are part of Djinn, by name.
        entry_points: what to discover instead of the entry points of all installed distributions.
        kinds: names of the kinds whose hooks are called; those of the others are not.

    Raises:
        PluginError: a plugin that was asked for by name, or a built-in one, cannot be found or used; or any plugin where
            the selection is strict.
    """
    found = survey(selection, builtins=builtins, entry_points=entry_points, kinds=kinds)
    registry = found.usable(selection.strict)
    for failure in found.failures:
        failure.warn()
    return registry


def load_opening(
    selection: Selection,
    *,
    builtins: Mapping[str, object],
    first: frozenset[str],
    kinds: frozenset[str],
) -> Registry:
    """The plugins with hooks of the kinds `first`, and of those whose kinds are not known, in place of all of `kinds`.

    `load_later` gets the others. The selection is one that names no plugins and has no settings of theirs, for which all must be there.
    """
    kinds_cache = KindsCache()
    found, available = _survey(selection, builtins, None, first, kinds_cache)
    _keep_kinds(kinds_cache, found.registry.rows, available)
    registry = found.usable(selection.strict)
    for failure in found.failures:
        failure.warn()
    return attrs.evolve(registry, later=(kinds - first) | {INTEGRATIONS})


def load_later(selection: Selection, opening: Registry, *, builtins: Mapping[str, object]) -> Registry:
    """All plugins, of which `opening` has those that were asked first; their objects stay, and what failed then is out."""
    active = {row.name for row in opening.rows if row.status == "active"}
    failed = {row.name: row for row in opening.rows if row.status == "failed" and row.name not in active}
    found = survey(
        msgspec.structs.replace(selection, disable=frozenset(failed)), builtins=builtins, kinds=opening.later
    )
    registry = found.usable(selection.strict)
    for failure in found.failures:
        if failure.row not in opening.rows:
            failure.warn()
    there = {kind.name: getattr(opening, kind.name) for kind in KINDS if kind.name not in opening.later}
    rows = tuple([failed.get(row.name, row) if row.status == "disabled" else row for row in registry.rows])
    return attrs.evolve(registry, rows=rows, owners={**registry.owners, **opening.owners}, **there)


def load_where_started(
    selection: Selection,
    *,
    builtins: Mapping[str, object],
    entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
    kinds: Collection[str] = EVERY_KIND,
) -> Registry:
    """As `load_registry`, in a process that another one started, which has loaded the same plugins and warned of them.

    Here only hooks that failed are warned of, since the other process may not call them. What implements none of the kinds, by what was
    kept of it, is not imported.
    """
    found, _ = _survey(selection, builtins, entry_points, kinds, KindsCache() if entry_points is None else None)
    registry = found.usable(selection.strict)
    warn_of_hooks(found.failures)
    return registry


def survey(
    selection: Selection,
    *,
    builtins: Mapping[str, object],
    entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
    kinds: Collection[str] = EVERY_KIND,
) -> LoadReport:
    """As `load_registry`, but raise nothing: what cannot be used is in the failures."""
    found, available = _survey(selection, builtins, entry_points, kinds)
    if entry_points is None:
        _keep_kinds(KindsCache(), found.registry.rows, available)
    _warn_of_unknown(selection.disable, available)
    for unknown, meant in found.unknown_settings.items():
        log().warning("there is no such setting of a plugin", setting=unknown, meant=meant or "nothing that is known")
    return found


def _survey(
    selection: Selection,
    builtins: Mapping[str, object],
    entry_points: Iterable[importlib.metadata.EntryPoint] | None,
    kinds: Collection[str],
    kinds_cache: KindsCache | None = None,
) -> tuple[LoadReport, tuple[PluginCandidate, ...]]:
    own, offered = built_in(builtins), installed(entry_points)
    intake = PluginLoader(selection.disable, kinds, selection.trace, selection.plugin_settings, kinds_cache=kinds_cache)
    for candidate in own:
        intake.take(candidate)
    if selection.plugins is None:
        for candidate in offered:
            intake.take(candidate)
    else:
        _take_requested(intake, selection.plugins, own, offered)
    rows = tuple(row for declared in intake.settings for row in declared.rows)
    registry = Registry(
        **intake.ordered(), rows=tuple(intake.rows), owners=intake.owners, plugin_settings=rows, later=frozenset()
    )
    known = {name for declared in intake.settings for name in declared.variables}
    plugins = {row.name for row in intake.rows} | {candidate.name for candidate in (*own, *offered)}
    unheard = unknown_settings(selection.plugin_settings, known, plugins)
    return LoadReport(registry, tuple(intake.failures), unheard), (*own, *offered)


def _keep_kinds(kinds_cache: KindsCache, rows: Iterable[PluginRow], available: Iterable[PluginCandidate]) -> None:
    """Keep the kinds that the plugins have that could be used, for processes that need few of them."""
    kinds = {(row.name, row.distribution): row.kind for row in rows if row.status == "active"}
    for candidate in available:
        found = kinds.get((candidate.name, candidate.distribution))
        if found and candidate.module:
            kinds_cache.note(candidate, tuple(found.split(",")))
    kinds_cache.save()


def _take_requested(
    intake: PluginLoader,
    requests: tuple[object, ...],
    own: tuple[PluginCandidate, ...],
    offered: tuple[PluginCandidate, ...],
) -> None:
    chosen: list[PluginCandidate] = []
    for request in {request if isinstance(request, str) else id(request): request for request in requests}.values():
        try:
            chosen.append(named(request, (*own, *offered)))
        except PluginError as error:
            intake.refuse(PluginCandidate(str(request), "", "", lambda: None), error, fatal=True)
    rest = [candidate for candidate in offered if candidate not in chosen]
    for candidate in sorted((*chosen, *rest), key=lambda candidate: candidate.name):
        if candidate in rest:
            intake.rows.append(candidate.row("unselected"))
        elif candidate not in own:
            intake.take(candidate, requested=True)


def _warn_of_unknown(disable: frozenset[str], available: tuple[PluginCandidate, ...]) -> None:
    names = {candidate.name for candidate in available}
    for unknown in sorted(disable - names):
        log().warning(
            "there is no such plugin to disable", plugin=unknown, error=f"{unknown!r}{choices(unknown, available)}"
        )
