"""Plugin loading: import plugins, check their API version, call the hook of a kind, and check the returned objects."""

from __future__ import annotations

import difflib
import inspect
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

import msgspec
import pluggy

from djinn_core.errors import PluginError
from djinn_core.hookspecs import PROJECT
from djinn_core.registry.contract import object_problem, version_conflict
from djinn_core.registry.discovery import PluginCandidate, imported, of_another_release, release_conflict
from djinn_core.registry.kinds import EVERY_KIND, INTEGRATIONS, KINDS, Kind
from djinn_core.registry.report import PluginRow, Status, log
from djinn_core.registry.selection import Selection
from djinn_core.registry.settings import DeclaredSettings, is_given_to, read_settings, warn_of_unknown_variables
from djinn_core.system.gc_pause import collect_later

_HOOKS: Final = {kind.hook: kind for kind in KINDS}


class HookError(PluginError):
    """A hook raised an exception, or returned an unusable result. Only processes that call this hook report it."""


class PluginFailure(msgspec.Struct, frozen=True):
    """A plugin that cannot be used.

    Attributes:
        fatal: True if the user named the plugin, or if it is built in.
    """

    row: PluginRow
    error: PluginError
    fatal: bool

    def warn(self) -> None:
        """Log a warning, once, that the plugin is not used."""
        log().warning("a plugin cannot be used", plugin=self.row.name, error=str(self.error))

    def warn_of_hook(self) -> None:
        """Warn if a hook failed. Other failures are reported by the process that loads all plugins."""
        if isinstance(self.error, HookError):
            self.warn()


class LoadedPlugin(msgspec.Struct, eq=False):
    """A plugin candidate with its load status.

    Attributes:
        candidate: the candidate.
        requested: True if the user named it.
        status: as in its row.
        error: reason why it cannot be used.
        modules: imported modules by entry point value.
        kinds: kinds of its hooks.
        settings: the settings of each of its modules, by `id(module)`.
    """

    candidate: PluginCandidate
    requested: bool = False
    status: Status = "active"
    error: str | None = None
    modules: dict[str, object] = {}
    kinds: tuple[str, ...] = ()
    settings: dict[int, DeclaredSettings] = {}

    @property
    def row(self) -> PluginRow:
        """Return the plugin's row in the report."""
        return self.candidate.row(self.status, self.kinds if self.status == "active" else (), self.error)


class PluginLoader:
    """The plugins of a process, in one plugin manager. The first request for a kind loads it. Thread-safe."""

    def __init__(
        self,
        selection: Selection,
        kinds: Collection[str],
        *,
        reserved_names: Mapping[tuple[str, str], PluginCandidate] | None = None,
        started: bool = False,
        libraries: bool = False,
    ) -> None:
        """Begin without plugins.

        Args:
            selection: disabled plugins, whether a failure is an error, and values of plugins' settings.
            kinds: names of the kinds whose hooks are called in this process.
            reserved_names: (kind, name) of objects that plugins may not register, with the owner of each name.
            started: True if the parent process warns of failures that both processes see.
            libraries: True if integrations are loaded although the program has not imported their libraries.
        """
        self.plugins: list[LoadedPlugin] = []
        self.failures: list[PluginFailure] = []
        self.owners: dict[tuple[str, str], LoadedPlugin] = {}
        installed_packages = {package for package in {kind.package for kind in KINDS} if find_spec(package) is not None}
        self.kinds = frozenset(kind.name for kind in KINDS if kind.name in kinds and kind.package in installed_packages)
        self.selection, self._started, self._libraries = selection, started, libraries
        self._reported_count = 0  # number of failures that were already raised or logged
        self._objects: dict[str, tuple[Any, ...]] = {}
        self._claimed_names = dict(reserved_names or {})
        self._names: dict[str, PluginCandidate] = {}
        self._manager = pluggy.PluginManager(PROJECT)
        self._specified_kinds: set[str] = set()
        self._lock = threading.RLock()

    def take(self, candidate: PluginCandidate, requested: bool = False, unselected: bool = False) -> None:
        """Add a plugin, or refuse it if its name is taken.

        A plugin without entry points is imported now, because its kinds are unknown.

        `requested` is True if the user named this plugin, and `unselected` if the user named only other plugins.
        """
        status: Status = "unselected" if unselected else "active"
        plugin = LoadedPlugin(candidate, requested, status, kinds=candidate.kinds)
        self.plugins.append(plugin)
        if candidate.name in self.selection.disable and not unselected:
            plugin.status = "disabled"
        if plugin.status != "active":
            return
        first = self._names.setdefault(candidate.name, candidate)
        with self._attribute_errors(plugin):
            if first is not candidate:
                raise PluginError(_conflict_text("plugin name", candidate.name, first, candidate))
            if not candidate.points and self._is_of_this_release(plugin):
                self._import(plugin, "", partial(imported, candidate.plugin, candidate.advice))

    def kinds_to_load_now(self) -> frozenset[str]:
        """Return the kinds of plugins that the user named or configured, or all kinds if the selection is strict.

        Their errors must show immediately.
        """
        if self.selection.strict:
            return self.kinds
        names = [plugin.candidate.name for plugin in self.plugins]
        plugin_settings = self.selection.plugin_settings
        kinds: frozenset[str] = frozenset()
        for plugin in self.plugins:
            if plugin.requested or any(
                is_given_to(setting, plugin.candidate.name, names) for setting in plugin_settings
            ):
                kinds = kinds.union(plugin.kinds)
        return kinds & self.kinds

    def report_failures(self) -> None:
        """Warn of plugins that have failed since the last call.

        Raises:
            PluginError: a failed plugin was named by the user or is built in, or the selection is strict.
        """
        with self._lock:
            new_failures, self._reported_count = self.failures[self._reported_count :], len(self.failures)
        for failure in new_failures:
            if failure.fatal or self.selection.strict:
                raise failure.error
        for failure in new_failures:
            failure.warn_of_hook() if self._started else failure.warn()

    def refuse(self, candidate: PluginCandidate, error: PluginError) -> None:
        """Record that a requested plugin cannot be found."""
        self.plugins.append(plugin := LoadedPlugin(candidate, requested=True))
        self._fail(plugin, error)

    def load(self, kind: str) -> tuple[Any, ...]:
        """Return the objects of a kind, in the order of its hook's docstring.

        Return an empty tuple for kinds of other processes.
        """
        if kind not in self.kinds:
            return ()
        with collect_later, self._lock:
            if kind not in self._objects:
                plugins: list[Any] = []
                contract = next(k for k in KINDS if k.name == kind)
                for plugin in self.plugins:
                    by_library = kind == INTEGRATIONS and plugin.candidate.points and not self._libraries
                    if plugin.status != "active" or kind not in plugin.kinds or by_library:
                        continue
                    if self._is_of_this_release(plugin):
                        with self._attribute_errors(plugin):
                            plugins += self._objects_of(plugin, contract)
                self._objects[kind] = tuple(self._in_call_order(kind, plugins))
            return self._objects[kind]

    def _is_of_this_release(self, plugin: LoadedPlugin) -> bool:
        """Return True if a plugin's distribution accepts this Djinn release.

        Otherwise refuse the plugin without importing it.
        """
        problem = release_conflict(plugin.candidate)
        if problem:
            self._fail(plugin, PluginError(f"{plugin.candidate.label} cannot be used: {problem}"))
        return not problem

    def _objects_of(self, plugin: LoadedPlugin, kind: Kind) -> list[Any]:
        candidate, objects = plugin.candidate, []
        points = {point.value: point for point in candidate.points.get(kind.name, ())}
        for value, point in points.items():
            if value not in plugin.modules:
                self._import(plugin, value, point.load)
        for value in points or plugin.modules:
            objects += self._call_hook(plugin, plugin.modules[value], kind)
        new_names: set[tuple[str, str]] = set()
        for item in objects:
            for key in _claimed_names(kind.name, item):
                if key in new_names or key in self._claimed_names:
                    raise HookError(_conflict_text(*key, self._claimed_names.get(key, candidate), candidate))
                new_names.add(key)
        self._claimed_names.update(dict.fromkeys(new_names, candidate))
        self.owners.update({(kind.name, item.name): plugin for item in objects})
        return objects

    def _import(self, plugin: LoadedPlugin, value: str, load: Callable[[], object]) -> None:
        """Load a plugin's module or object with `load`, check it, and read its settings.

        `value` is the value of its entry points, or an empty string.
        """
        try:
            module = load()
        except PluginError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(f"importing it raised {shown(error)}. Repair, uninstall or disable it") from error
        if problem := version_conflict(module):
            raise PluginError(problem)
        kinds = self._register(plugin.candidate, module)
        points = plugin.candidate.points
        declared_kinds = {kind for kind, listed in points.items() if any(point.value == value for point in listed)}
        if not points:
            plugin.kinds = kinds
        elif missing := declared_kinds.difference(kinds):
            raise PluginError(
                f"its entry point in the group `djinn.{min(missing)}` is {value}, which has no djinn_register_{min(missing)}"
            )
        elif undeclared := set(kinds) - declared_kinds:
            raise PluginError(
                f"{value} has djinn_register_{min(undeclared)}, and no entry point in the group `djinn.{min(undeclared)}`. Add one"
            )
        plugin.modules = {**plugin.modules, value: module}
        declared_settings = read_settings(module, plugin.candidate.name, self.selection.plugin_settings)
        plugin.settings = {**plugin.settings, id(module): declared_settings}
        if not self._started:
            names = {other_plugin.candidate.name for other_plugin in self.plugins}
            warn_of_unknown_variables(
                self.selection.plugin_settings, plugin.candidate.name, declared_settings.variables, names
            )

    def _register(self, candidate: PluginCandidate, module: object) -> tuple[str, ...]:
        """Register a plugin in the manager, which validates its hooks. Return the hooks' kinds in pipeline order."""
        if isinstance(module, type):
            raise PluginError(f"it is the class {module.__name__}; pass an instance")
        kinds = tuple(kind.name for kind in KINDS if hasattr(module, kind.hook))
        for kind in KINDS:
            if kind.name in self.kinds.intersection(kinds) - self._specified_kinds:
                specification = ModuleType(kind.hook)  # pluggy looks at every attribute of a module
                setattr(specification, kind.hook, getattr(kind.specification, kind.hook))
                self._manager.add_hookspecs(specification)
                self._specified_kinds.add(kind.name)
        try:
            self._manager.register(module, name=f"{candidate.name} {id(module)}")
            self._check_hooks(module)
        except ValueError as error:
            raise PluginError("it is already registered under another name") from error
        except pluggy.PluginValidationError as error:
            if self._manager.is_registered(module):  # some versions of pluggy register it in part
                self._manager.unregister(module)
            raise PluginError(f"a hook's signature differs from Djinn's: {' '.join(str(error).split())}") from error
        except PluginError:
            self._manager.unregister(module)
            raise
        return kinds

    def _check_hooks(self, module: object) -> None:
        callers = self._manager.get_hookcallers(module) or []
        for caller in callers:
            if caller.name not in _HOOKS:
                close = difflib.get_close_matches(caller.name, _HOOKS, n=1, cutoff=0.0)[0]
                raise PluginError(f"there is no hook {caller.name}; did you mean {close}?")
            own = (implementation for implementation in caller.get_hookimpls() if implementation.plugin is module)
            if any(implementation.hookwrapper or implementation.wrapper for implementation in own):
                raise PluginError(f"its {caller.name} is a wrapper, but hooks of Djinn must not be wrappers")
        unmarked = sorted({name for name in _HOOKS if hasattr(module, name)} - {caller.name for caller in callers})
        if unmarked:
            raise PluginError(f"its {unmarked[0]} is not marked as a hook. Put `@djinn.hooks.hookimpl` above it")
        if not callers:
            raise PluginError(f"it implements no hook of Djinn. There are: {', '.join(_HOOKS)}")

    def _call_hook(self, plugin: LoadedPlugin, module: object, kind: Kind) -> list[Any]:
        implementations = getattr(self._manager.hook, kind.hook).get_hookimpls()
        (own,) = (implementation for implementation in implementations if implementation.plugin is module)
        # Called without the manager, which puts plugins into a set: an unhashable object may be a plugin.
        settings = {"settings": plugin.settings[id(module)].values} if "settings" in own.argnames else {}
        tracing = _log_call(plugin, kind) if self.selection.trace else nullcontext()
        try:
            with tracing:
                result = own.function(**settings)
                objects = list(_as_objects(result, kind)) if result is not None else []
        except PluginError:
            raise
        except Exception as error:
            raise HookError(f"its {kind.hook} raised {shown(error)}") from error
        for item in objects:
            if problem := object_problem(item, kind):
                raise HookError(f"its {kind.hook} {problem}")
        return objects

    @contextmanager
    def _attribute_errors(self, plugin: LoadedPlugin) -> Iterator[None]:
        """Attribute a `PluginError` from the block to the plugin, and refuse the plugin. Other exceptions propagate."""
        try:
            yield
        except PluginError as error:
            candidate = plugin.candidate
            advice = of_another_release(*candidate.origin)
            named_error = type(error)(f"{candidate.label} cannot be used: {error}{f'. {advice}' if advice else ''}")
            named_error.__cause__ = error.__cause__
            self._fail(plugin, named_error)

    def _fail(self, plugin: LoadedPlugin, error: PluginError) -> None:
        plugin.status, plugin.error = "failed", str(error)
        self.failures.append(PluginFailure(plugin.row, error, plugin.requested or plugin.candidate.builtin))

    def _in_call_order(self, kind: str, objects: list[Any]) -> list[Any]:
        def is_builtin(item: Any) -> bool:
            return self.owners[kind, item.name].candidate.builtin

        if kind == "cost_models":
            return sorted(objects, key=lambda model: (bool(not model.operations), is_builtin(model), model.name))
        if kind == "transports":
            return sorted(objects, key=lambda transport: (-transport.capabilities.speed, transport.name))
        if kind == "weight_formats":
            return sorted(objects, key=lambda weight_format: (not is_builtin(weight_format), weight_format.name))
        return sorted(objects, key=lambda item: item.name)


def _claimed_names(kind: str, item: Any) -> Iterator[tuple[str, str]]:
    yield kind, item.name
    if kind == "transports":
        for scheme in item.schemes:
            yield "URL scheme", scheme
    if kind == "renderers":
        for suffix in item.suffixes:
            yield "file ending", suffix
    if kind == "weight_formats":
        for suffix in item.suffixes:
            yield "ending of files with weights", suffix


def _conflict_text(what: str, name: str, first: PluginCandidate, second: PluginCandidate) -> str:
    what_is_taken = f"name {name!r} among {what.replace('_', ' ')}" if what in EVERY_KIND else f"{what} {name!r}"
    return (
        f"the {what_is_taken} is taken twice: {first.label} has it, {second.label} is refused. "
        "Uninstall or disable one of them, or rename what it offers"
    )


def _as_objects(result: object, kind: Kind) -> Iterable[Any]:
    if inspect.iscoroutine(result):
        result.close()  # it will not be awaited; without this Python would warn
    if isinstance(result, str) or not isinstance(result, Iterable):
        raise HookError(f"its {kind.hook} returned {result!r}, but must return a list of {kind.base.__name__} objects")
    return result


def shown(error: BaseException) -> str:
    """Return type, message and innermost line of an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{location}"


@contextmanager
def _log_call(plugin: LoadedPlugin, kind: Kind) -> Iterator[None]:
    started, raised = time.monotonic(), None
    try:
        yield
    except Exception as error:
        raised = shown(error)
        raise
    finally:
        seconds = round(time.monotonic() - started, 6)
        # The user asked for this log, so its level is shown by default.
        log().warning("called a hook", plugin=plugin.candidate.name, hook=kind.hook, seconds=seconds, raised=raised)
