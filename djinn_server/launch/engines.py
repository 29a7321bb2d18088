"""Choose an engine and start executors with it.

The built-in engine `local` starts processes on this machine.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import attrs

from djinn_core.errors import PluginError, install_hint
from djinn_core.registry.embedded_executors import LOCAL
from djinn_core.settings import Settings
from djinn_server.hookspecs.executors import ExecutorEngine, ExecutorOptions, LaunchRequest
from djinn_server.launch.executor_config import ExecutorConfig
from djinn_server.launch.flags import flagged
from djinn_server.launch.held_executor import HeldExecutor, checked_handle
from djinn_server.launch.process import ExecutorProcess, ForkServer


class LocalEngine(ExecutorEngine):
    """Start executors as processes on this machine.

    It ignores the resources and the environment of a launch request.
    """

    name = LOCAL

    def __init__(self, find_fork_server: Callable[[ExecutorConfig], ForkServer | None] = lambda _: None) -> None:
        """`find_fork_server`: returns the fork server for a configuration, or None to start a new interpreter."""
        self._find_fork_server = find_fork_server

    def launch(self, options: ExecutorOptions, request: LaunchRequest) -> ExecutorProcess:  # noqa: ARG002 - the only machine is this one
        """Start an executor process, as `ExecutorEngine.launch` does."""
        config = cast("ExecutorConfig", options)
        return ExecutorProcess(config, fork_server=self._find_fork_server(config))


StartedExecutor = ExecutorProcess | HeldExecutor


def start_executor(engine: ExecutorEngine, config: ExecutorConfig, request: LaunchRequest) -> StartedExecutor:
    """Start an executor with an engine, and return at once.

    Raises:
        StartupError: as `ExecutorEngine.launch`.
        PluginError: the engine returned no `ExecutorHandle`.
    """
    launched = engine.launch(config, request)
    if isinstance(launched, ExecutorProcess):
        return launched
    return HeldExecutor(checked_handle(launched, engine, "launch"))


def engine_named(engine: str, engines: Iterable[ExecutorEngine]) -> ExecutorEngine:
    """Return the engine with this name.

    Raises:
        PluginError: no engine has this name. The message says how to install one.
    """
    if engine == LOCAL:
        return LocalEngine()
    by_name = {engine.name: engine for engine in engines}
    if engine not in by_name:
        raise PluginError(
            f"no engine {engine!r} is installed (installed: {', '.join(sorted({LOCAL, *by_name}))}). For the engine ray, run "
            f"{install_hint('plugins/ray')}. `djinn plugins` shows installed, disabled and broken plugins"
        )
    return by_name[engine]


@attrs.frozen
class EngineConfig:
    """Choice of the engine that starts executors, and its options.

    Attributes:
        name: name of the engine.
        address: address of the engine's service; empty: the engine finds its service.
        executors: number of executors for each device; 0: the number in the settings.
        resources, runtime_env, placement_group: as in `LaunchRequest`.
    """

    name: str = flagged("", "--engine", "Engine that starts the executors, such as ray. Default: local, this machine.")
    address: str = flagged("", "--engine-address", "Address of the engine, such as that of a cluster.")
    executors: int = flagged(
        0, "--executors", "Number of executors that an engine other than local starts for each device.", least=1
    )
    resources: tuple[tuple[str, float], ...] = ()
    runtime_env: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    placement_group: Any = None

    def with_settings(self, settings: Settings) -> EngineConfig:
        """Return a copy in which the settings supply unset values."""
        return EngineConfig(
            self.name or settings.engine,
            self.address or settings.engine_address,
            self.executors or settings.executors,
            settings.resources,
            settings.runtime_env,
            settings.placement_group,
        )

    def requests(
        self, count: int, notify: Callable[[str], None] = lambda _: None, first: int = 0
    ) -> tuple[LaunchRequest, ...]:
        """Return launch requests for `count` executors that start together.

        `notify`: as in `LaunchRequest`. `first`: number of the first executor.
        """
        group = secrets.token_hex(4)
        options = (self.address, dict(self.resources), self.runtime_env, self.placement_group)
        return tuple(LaunchRequest(number, count, group, *options, notify) for number in range(first, first + count))
