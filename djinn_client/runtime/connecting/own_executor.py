"""Plugins that exist only in this process: objects, and modules that no other process can import.

Executors do not load them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import attrs

from djinn_core.errors import PluginError
from djinn_core.logs import get_logger
from djinn_core.registry.embedded_executors import find_starter
from djinn_core.registry.kinds import EXECUTOR_KINDS, KINDS, Kind
from djinn_core.settings import Settings

if TYPE_CHECKING:
    from djinn_core.registry.embedded_executors import EmbeddedExecutor
    from djinn_core.registry.registry import Registry

_MAIN: Final = "__main__"  # `__main__` is another module in every process
_log = get_logger("djinn.runtime")


def names_for_executors(plugins: Sequence[Any] | None) -> tuple[str, ...] | None:
    """Return names by which this program's own executors load the plugins.

    Plugins without such a name stay in the client. Return None if `plugins` is None.

    Raises:
        PluginError: a plugin without such a name has hooks for executors. The message says what to do.
    """
    if plugins is None:
        return None
    for plugin, reason in _confined(plugins):
        hooks = [kind.hook for kind in _kinds(plugin) if _is_for_executors(kind)]
        if hooks:
            raise PluginError(
                f"the plugin {_label(plugin)} cannot be used: {reason}, but its hooks {_join_names(hooks)} run in the executor, which "
                "is another process. Put the plugin into a module on the import path, and pass that module or its name. Or "
                'run the executor in this process: djinn.configure(executor="inline")'
            )
        _log.info("only the client loads a plugin", plugin=_label(plugin), reason=reason)
    return tuple(name for plugin in plugins if (name := _name_elsewhere(plugin)))


def check_for_servers(plugins: Sequence[Any] | None) -> None:
    """Check that plugins of this process have hooks for clients. A server loads only its own plugins.

    Raises:
        PluginError: a plugin has no hooks for clients. The message says what to do.
    """
    for plugin, reason in _confined(plugins or ()):
        kinds = _kinds(plugin)
        hooks = [kind.hook for kind in kinds if _is_for_executors(kind) or kind.processes == ("gateway",)]
        if not hooks:
            continue
        advice = (
            "Install the plugin on the server, as a module on the import path of `djinn serve` (the server's setting "
            "`plugins` may name it)"
        )
        if len(hooks) == len(kinds):
            raise PluginError(
                f"the plugin {_label(plugin)} would do nothing: {reason}, and its hooks {_join_names(hooks)} are for servers, which "
                f"load their own plugins. {advice}, and remove the plugin from the client's setting `plugins`"
            )
        _log.warning(
            "a plugin's hooks for servers have no effect here: servers load their own plugins",
            plugin=_label(plugin),
            reason=reason,
            hooks=hooks,
            advice=advice,
        )


def _confined(plugins: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """Yield the plugins that exist only in this process, each with the reason."""
    for plugin in plugins:
        if _name_elsewhere(plugin):
            continue
        if isinstance(plugin, ModuleType):
            yield plugin, "other processes cannot import this module by its name"
        else:
            yield plugin, "other processes cannot import an object"


def _name_elsewhere(plugin: Any) -> str:
    """Return the name by which another process can load the plugin, or an empty text if no process can."""
    if isinstance(plugin, str):
        return plugin
    return plugin.__name__ if isinstance(plugin, ModuleType) and _is_importable(plugin) else ""


def _is_importable(module: ModuleType) -> bool:
    """Return True if a process with this import path finds the file of `module` under its name."""
    loaded = module.__spec__
    if module.__name__ == _MAIN or loaded is None or not loaded.has_location or loaded.origin is None:
        return False
    spec = _spec_of(module.__name__)
    if spec is None or spec.origin is None:
        return False
    return Path(spec.origin).resolve() == Path(loaded.origin).resolve()


def _spec_of(name: str) -> ModuleSpec | None:
    """Return the spec that an import of this module name would find now, or None if it would find none.

    `importlib.util.find_spec` would return the spec of the loaded module.
    """
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and path is None:
        return None
    specs = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _kinds(plugin: Any) -> tuple[Kind, ...]:
    return tuple(kind for kind in KINDS if hasattr(plugin, kind.hook))


def _is_for_executors(kind: Kind) -> bool:
    """Return True if executors call the hook of `kind`, and clients do not."""
    return "executor" in kind.processes and "client" not in kind.processes


def _label(plugin: Any) -> str:
    name = getattr(plugin, "__name__", "") or getattr(plugin, "name", "")
    return repr(name if isinstance(name, str) and name else type(plugin).__name__)


def _join_names(hooks: Sequence[str]) -> str:
    return " and ".join(hooks)


def start_executors(
    settings: Settings,
    registry: Registry | None = None,
    joining: tuple[int, int] | None = None,
    unused_seconds: float = 0.0,
) -> tuple[EmbeddedExecutor, ...]:
    """Start the executors that `open_connections` will need. Return () if a server or an inline executor is configured.

    This returns before the executors are ready, which takes seconds, so that the client can load modules meanwhile.

    Args:
        settings: the settings, which select kind and number of executors.
        registry: plugins, among them the engine that the settings may name. None: plugins are not loaded yet.
        joining: as in `ExecutorStarter.start`.
        unused_seconds: as in `ExecutorStarter.start`.

    Raises:
        PluginError: a plugin has hooks for executors, but executors cannot import it.
        StartupError: the server package is not installed, or a process cannot be started.
    """
    if settings.executor == "inline" or settings.servers or settings.connection_file is not None:
        return ()
    starter = find_starter()
    names = names_for_executors(settings.plugins)
    if registry is not None:  # other machines may lack packages that only clients use
        names = registry.used_in(EXECUTOR_KINDS, names)
    executor_settings = attrs.evolve(settings, plugins=names)
    return starter.start(executor_settings, registry.executors if registry is not None else (), joining, unused_seconds)
