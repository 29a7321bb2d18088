"""The engines that can be chosen: the built-in one, processes on this machine, and those of plugins."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import attrs

from djinn_core.errors import PluginError
from djinn_core.hookspecs.executors import ExecutorEngine, ExecutorOptions, Launched, LaunchWish
from djinn_core.registry.embedded_executors import LOCAL
from djinn_core.settings import Settings
from djinn_server.launch.executor_config import ExecutorConfig
from djinn_server.launch.flags import flagged
from djinn_server.launch.fork_server_client import ForkServerClient
from djinn_server.launch.process import ExecutorProcess


class LocalEngine:
    """Starts executors as processes on this machine, at once and whatever resources are wished for."""

    name = LOCAL

    def __init__(self, prepared: Callable[[ExecutorConfig], ForkServerClient | None] = lambda _: None) -> None:
        """`prepared`: says by an executor's configuration from which process it is forked; None: it is started anew."""
        self._prepared = prepared

    def launch(self, options: ExecutorOptions, wish: LaunchWish) -> Launched:  # noqa: ARG002 - there is one place
        """As `ExecutorEngine.launch`."""
        config = cast("ExecutorConfig", options)
        return ExecutorProcess(config, fork_server=self._prepared(config))


def engine_named(engine: str, engines: Iterable[ExecutorEngine]) -> ExecutorEngine:
    """The engine that the setting `engine` names.

    Raises:
        PluginError: no engine has this name. The message names the folder of Djinn's engines.
    """
    if engine == LOCAL:
        return LocalEngine()
    known = {engine.name: engine for engine in engines}
    if engine not in known:
        raise PluginError(
            f"no engine {engine!r} is installed (installed: {', '.join(sorted({LOCAL, *known}))}). Install one from "
            "plugins of Djinn's repository, for example `pip install './plugins/ray[ray]'`. `djinn plugins` "
            "lists installed, broken and disabled plugins"
        )
    return known[engine]


@attrs.frozen
class EngineConfig:
    """The engine that starts executors.

    Attributes:
        name: of its engine. address: where it is; empty: the engine finds it.
        executors: how many executors it starts for each device; 0: as many as the settings say.
        resources, runtime_env, placement_group: as in `LaunchWish`.
    """

    name: str = flagged("", "--engine", "Engine that starts the executors, such as ray. Default: local, this machine.")
    address: str = flagged("", "--engine-address", "Address of the engine, such as that of a cluster.")
    executors: int = flagged(0, "--executors", "How many executors another engine starts for each device.", least=1)
    resources: tuple[tuple[str, float], ...] = ()
    runtime_env: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    placement_group: Any = None

    def with_settings(self, settings: Settings) -> EngineConfig:
        """The same with the settings in place of what is not configured."""
        return EngineConfig(
            self.name or settings.engine,
            self.address or settings.engine_address,
            self.executors or settings.executors,
            settings.resources,
            settings.runtime_env,
            settings.placement_group,
        )

    def wishes(
        self, count: int, notify: Callable[[str], None] = lambda _: None, first: int = 0
    ) -> tuple[LaunchWish, ...]:
        """A wish for each of `count` executors that are started together. `notify`: as in `LaunchWish`. `first`: number of the first."""
        group = secrets.token_hex(4)
        where = (self.address, dict(self.resources), self.runtime_env, self.placement_group)
        return tuple(LaunchWish(number, count, group, *where, notify) for number in range(first, first + count))
