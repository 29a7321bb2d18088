"""Loading one plugin: import it, check its API version, ask its hooks for objects and check those."""

from __future__ import annotations

import difflib
import inspect
import time
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import msgspec
import pluggy

from djinn_core.errors import PluginError
from djinn_core.hookspecs import API_VERSION, PROJECT
from djinn_core.registry.contract import complaint
from djinn_core.registry.discovery import PluginCandidate, check_release, of_another_release
from djinn_core.registry.kinds import COMMAND_KINDS, KINDS, Kind
from djinn_core.registry.report import log
from djinn_core.registry.settings import DeclaredSettings, read_settings
from djinn_core.settings import PluginSetting

_HOOKS: Final = frozenset(kind.hook for kind in KINDS)
_COMMAND_HOOKS: Final = frozenset(kind.hook for kind in KINDS if kind.name in COMMAND_KINDS)
_PREFIX: Final = "djinn_"  # of hooks: what else than functions may be one differs from version to version of pluggy
_FUNCTIONS: Final = (FunctionType, MethodType, staticmethod, classmethod)


@cache
def _specifications(hooks: frozenset[str]) -> ModuleType:
    """These hooks and nothing else: pluggy looks at each name of a module, for each plugin again.

    What declares most hooks imports PyTorch; what declares the hook of commands does not.
    """
    found = ModuleType("djinn_core.hookspecs.hooks")
    for kind in KINDS:
        if kind.hook in hooks:
            setattr(found, kind.hook, getattr(kind.specification, kind.hook))
    return found


class _Manager(pluggy.PluginManager):
    """Manager of one plugin. Of a module's names that are none of Djinn's hooks, it looks at functions alone: pluggy takes long for each."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """Options of the hook that the plugin implements under a name; None if it is no hook."""
        looked_at = name.startswith(_PREFIX) or not isinstance(plugin, ModuleType)
        if not looked_at and not isinstance(vars(plugin).get(name), _FUNCTIONS):
            return None
        return super().parse_hookimpl_opts(plugin, name)


class HookError(PluginError):
    """A hook raised, or what it returned cannot be used: only processes that call this hook know of it."""


class LoadedPlugin(msgspec.Struct, frozen=True):
    """A plugin that passed all checks: the kinds of hook that it implements, and the objects that it registers."""

    candidate: PluginCandidate
    kinds: tuple[str, ...]
    objects: Mapping[str, tuple[Any, ...]]
    settings: DeclaredSettings = msgspec.field(default_factory=DeclaredSettings)


def load(
    candidate: PluginCandidate, kinds: Collection[str], trace: bool, given: Sequence[PluginSetting] = ()
) -> LoadedPlugin:
    """Load a plugin and call its hooks of the given kinds; with `trace` each call is logged. `given`: to its settings.

    A plugin has a manager of its own, so that none can see, wrap or break the hooks of another.

    Raises:
        ConfigurationError: a setting of its own was given a value that it cannot have.
        PluginError: it requires another release of Djinn, cannot be imported, is written for another API version, implements no hook of Djinn, or a hook
            raised or returned something that does not satisfy its Protocol. The message names the plugin.
    """
    check_release(candidate)
    try:
        plugin = _import(candidate)
        _check_version(plugin)
        manager = _manager(candidate, plugin, _COMMAND_HOOKS if COMMAND_KINDS.issuperset(kinds) else _HOOKS, trace)
        implemented = tuple(kind for kind in KINDS if _implementations(manager, kind))
        settings = read_settings(plugin, candidate.name, given)
        asked = [kind for kind in implemented if kind.name in kinds]
        objects = {kind.name: _registered(manager, kind, settings.values) for kind in asked}
    except PluginError as error:
        advice = of_another_release(candidate.distribution, candidate.version)
        said = f"{error}. {advice}" if advice else str(error)
        raise type(error)(f"{candidate.label} cannot be used: {said}") from error.__cause__
    return LoadedPlugin(candidate, tuple(kind.name for kind in implemented), objects, settings)


def _import(candidate: PluginCandidate) -> object:
    try:
        return candidate.load()
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"importing it raised {shown(error)}. Mend or uninstall it, or disable it") from error


def _check_version(plugin: object) -> None:
    version = getattr(plugin, "djinn_api_version", None)
    if version is None:
        raise PluginError(
            "it does not say which plugin API it was written for. Add `djinn_api_version = "
            f"{API_VERSION}` beside its hooks, where {API_VERSION} is the version that this Djinn has"
        )
    if not isinstance(version, int):
        raise PluginError(f"its `djinn_api_version` is {version!r}, but must be a whole number: {API_VERSION}")
    if version != API_VERSION:
        older = version < API_VERSION
        advice = "Install a newer version of the plugin" if older else "Install a newer Djinn"
        raise PluginError(
            f"it was written for plugin API version {version}, and this Djinn has version {API_VERSION}. {advice}"
        )


def _implementations(manager: pluggy.PluginManager, kind: Kind) -> Sequence[pluggy.HookImpl]:
    """Implementations of a kind's hook; a hook that was not declared to the manager may have no caller."""
    caller = getattr(manager.hook, kind.hook, None)
    return caller.get_hookimpls() if caller is not None else ()


def _manager(candidate: PluginCandidate, plugin: object, hooks: frozenset[str], trace: bool) -> pluggy.PluginManager:
    """The manager of a plugin. `hooks`: those whose specifications it may need."""
    if isinstance(plugin, type):
        raise PluginError(f"it is the class {plugin.__name__}; pass an instance")
    manager = _Manager(PROJECT)
    if named := frozenset(name for name in hooks if hasattr(plugin, name)):
        manager.add_hookspecs(_specifications(named))
    try:
        manager.register(plugin, name=candidate.name)
    except (pluggy.PluginValidationError, ValueError) as error:
        raise PluginError(f"a hook is not declared as Djinn declares it: {' '.join(str(error).split())}") from error
    _check_hooks(manager, plugin)
    if trace:
        _trace(manager, candidate)
    return manager


def _check_hooks(manager: pluggy.PluginManager, plugin: object) -> None:
    callers = manager.get_hookcallers(plugin) or []
    for caller in callers:
        if caller.name not in _HOOKS:
            close = difflib.get_close_matches(caller.name, _HOOKS, n=1, cutoff=0.0)[0]
            raise PluginError(f"there is no hook {caller.name}; did you mean {close}?")
        if any(implementation.hookwrapper or implementation.wrapper for implementation in caller.get_hookimpls()):
            raise PluginError(f"its {caller.name} is a wrapper; hooks of Djinn register objects and wrap nothing")
    unmarked = sorted({name for name in _HOOKS if hasattr(plugin, name)} - {caller.name for caller in callers})
    if unmarked:
        raise PluginError(f"its {unmarked[0]} is not marked as a hook. Put `@djinn.hookimpl` above it")
    if not callers:
        raise PluginError(f"it implements no hook of Djinn. There are: {', '.join(kind.hook for kind in KINDS)}")


def _registered(manager: pluggy.PluginManager, kind: Kind, settings: Any) -> tuple[Any, ...]:
    try:
        results = getattr(manager.hook, kind.hook)(settings=settings)
        objects = tuple(item for result in results for item in _listed(result, kind))
    except PluginError:
        raise
    except Exception as error:
        raise HookError(f"its {kind.hook} raised {shown(error)}") from error
    for item in objects:
        if problem := complaint(item, kind):
            raise HookError(f"its {kind.hook} {problem}")
    return objects


def _listed(result: object, kind: Kind) -> Iterable[Any]:
    if inspect.iscoroutine(result):
        result.close()  # it will not be awaited, which Python would warn of
    if isinstance(result, str) or not isinstance(result, Iterable):
        raise HookError(
            f"its {kind.hook} returned {result!r}, but must return a list of {kind.protocol.__name__} objects"
        )
    return result


def shown(error: BaseException) -> str:
    """Type, message and innermost line of an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _trace(manager: pluggy.PluginManager, candidate: PluginCandidate) -> None:
    started: list[float] = []

    def before(*_: object) -> None:
        started.append(time.monotonic())

    def after(outcome: pluggy.Result[Any], hook: str, *_: object) -> None:
        seconds = round(time.monotonic() - started.pop(), 6)
        raised = shown(outcome.exception) if outcome.exception else None
        # The person who runs this asked to see it, so its level is one that is shown without further settings.
        log().warning("called a hook", plugin=candidate.name, hook=hook, seconds=seconds, raised=raised)

    manager.add_hookcall_monitoring(before, after)
