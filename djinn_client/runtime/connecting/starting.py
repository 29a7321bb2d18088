"""Start of a program's own executors. Nothing here imports PyTorch: they may start before this program has imported it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from djinn_client.runtime.connecting.local_plugins import names_for_executors
from djinn_core.registry.embedded_executors import find_starter
from djinn_core.registry.kinds import EXECUTOR_KINDS
from djinn_core.settings import Settings

if TYPE_CHECKING:
    from djinn_core.registry.embedded_executors import EmbeddedExecutor
    from djinn_core.registry.registry import Registry


def start_executors(
    settings: Settings,
    registry: Registry | None = None,
    joining: tuple[int, int] | None = None,
    unused_seconds: float = 0.0,
) -> tuple[EmbeddedExecutor, ...]:
    """Start the executors that `open_connections` will need; none where a server is configured, or it will be a thread.

    Returns at once. A process takes seconds until it is ready: what this one has to load can be loaded meanwhile.

    Args:
        settings: say what and how many.
        registry: has the engines of plugins, of which the settings may name one; None before plugins are loaded.
        joining: as in `ExecutorStarter.start`.
        unused_seconds: as in `ExecutorStarter.start`.

    Raises:
        PluginError: a plugin has hooks for executors, and these cannot import it.
        StartupError: the server package is not installed, or a process cannot be started.
    """
    if settings.executor == "inline" or settings.servers or settings.connection_file is not None:
        return ()
    starter = find_starter()
    names = names_for_executors(settings.plugins)
    if registry is not None:  # other machines need not have what only clients use
        names = registry.used_in(EXECUTOR_KINDS, names)
    there = attrs.evolve(settings, plugins=names)
    return starter.start(there, registry.executors if registry is not None else (), joining, unused_seconds)
