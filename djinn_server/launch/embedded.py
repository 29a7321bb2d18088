"""Start the executors that a client program owns. This module does not import PyTorch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from djinn_core.errors import ConfigurationError, StartupError, install_hint
from djinn_core.logs import get_logger
from djinn_core.registry.embedded_executors import LOCAL
from djinn_core.settings import Settings
from djinn_core.system.directories import cache_directory
from djinn_core.system.private_directories import private_directory
from djinn_server.launch.engines import EngineConfig, LocalEngine, engine_named
from djinn_server.launch.executor_config import EVERYTHING, ExecutorConfig, RecoveryConfig
from djinn_server.launch.own_executor import LEASE_SECONDS, OwnExecutor
from djinn_server.launch.own_journals import own_journals
from djinn_server.launch.process import ForkServer

if TYPE_CHECKING:
    from djinn_core.hookspecs.transports import Connection
    from djinn_server.hookspecs.executors import ExecutorEngine, LaunchRequest

FORK_SERVERS: Final = "djinn_fork_server"  # entry-point group: a function that returns the fork server of this user
_log = get_logger("djinn.launch")


def start(
    settings: Settings,
    engines: Sequence[ExecutorEngine],
    joining: tuple[int, int] | None = None,
    unused_seconds: float = 0.0,
) -> tuple[OwnExecutor, ...]:
    """Start the executors of a client program, as `ExecutorStarter.start` does."""
    engine = engine_named(settings.engine, engines)
    if engine.name == LOCAL and settings.prepared_seconds:
        engine = LocalEngine(partial(_fork_server, settings.prepared_seconds))
    executors: list[OwnExecutor] = []
    first, count = joining or (0, settings.executors)
    requests = EngineConfig().with_settings(settings).requests(count, partial(_show, settings.progress), first)
    try:
        for request in requests:
            executors.append(_start_executor(settings, engine, request, unused_seconds))  # noqa: PERF401 - an error closes the started ones
    except BaseException:
        for executor in executors:
            executor.close(0.0)
        raise
    return tuple(executors)


def begin_inline(settings: Settings, client: str) -> tuple[Connection, str]:
    """Start an inline executor, as `ExecutorStarter.begin_inline` does."""
    # Imported late: it imports PyTorch.
    begin: Callable[[Settings, str], tuple[Connection, str]] = importlib.import_module("djinn_server.inline").begin
    return begin(settings, client)


def _show(progress: bool, line: str) -> None:
    """Print the reason for a wait if the user watches a terminal, else log the reason."""
    if progress and sys.stderr.isatty():
        sys.stderr.write(f"{line}\n")
    else:
        _log.info("executors are being started", waiting=line)


def _start_executor(
    settings: Settings, engine: ExecutorEngine, request: LaunchRequest, unused_seconds: float
) -> OwnExecutor:
    models = attrs.evolve(EVERYTHING, published=_published()) if engine.name == LOCAL else EVERYTHING
    config = ExecutorConfig(settings.device, tenants=False, models=models, unused_seconds=unused_seconds)
    config = config.with_settings(settings)
    if settings.recover and engine.name != LOCAL:  # a relative path: the holder resolves it on its machine
        recovery = RecoveryConfig(LEASE_SECONDS, Path("journals"))
        return OwnExecutor(attrs.evolve(config, recovery=recovery), engine, request)
    return OwnExecutor(config, engine, request, own_journals() if settings.recover else None)


def _fork_server(seconds: float, config: ExecutorConfig) -> ForkServer | None:
    """Return the fork server for executors with this configuration, or None if it cannot run on this machine.

    `seconds`: the setting `prepared_seconds`.

    Raises:
        StartupError: the package with the fork server is not installed.
    """
    providers = tuple(entry_points(group=FORK_SERVERS))
    if not providers:
        raise StartupError(
            "the setting `prepared_seconds` needs a plugin that is not installed: set `prepared_seconds` to 0, or run "
            + install_hint("plugins/launchers")
        )
    find: Callable[[float, ExecutorConfig], ForkServer | None] = providers[0].load()
    return find(seconds, config)


def _published() -> Path | None:
    """Return the directory of weights that this user's programs share by name, or None if it cannot be used."""
    try:
        return private_directory(cache_directory() / "own-published", "published weights")
    except (OSError, ConfigurationError) as error:
        _log.warning("cannot publish weights: the directory for published weights cannot be used", error=str(error))
        return None
