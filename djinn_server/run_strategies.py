"""Collect an executor's run strategies and compilers from plugins."""

from __future__ import annotations

from collections.abc import Sequence

from djinn_core.errors import StartupError
from djinn_core.logs import get_logger
from djinn_core.registry.registry import Registry
from djinn_server.context import ExecutorContext
from djinn_server.hookspecs.compilers import Compiler
from djinn_server.hookspecs.run_strategies import RunStrategy, StrategyContext
from djinn_server.launch.executor_config import ExecutorConfig

_log = get_logger("djinn.server")


def strategies_of(registry: Registry, config: ExecutorConfig) -> Sequence[RunStrategy]:
    """Return an executor's strategies: first those that join sessions. Log options that lack a strategy."""
    strategies: Sequence[RunStrategy] = registry.run_strategies
    for name in config.strategies.keys() - {strategy.name for strategy in strategies}:
        _log.warning(
            f"{config.strategies[name]} has no effect, and programs run op by op: no plugin has the run strategy {name!r}. "
            "Install the package in plugins/strategies of the checkout, or its wheel, beside djinn-server"
        )
    enabled = [strategy for strategy in strategies if not strategy.on_request or strategy.name in config.strategies]
    return sorted(enabled, key=lambda strategy: not strategy.joins_sessions)


def compilers_of(registry: Registry, config: ExecutorConfig) -> tuple[Compiler, ...]:
    """Return the compilers that the operator chose, in the order in which they are tried.

    Raises:
        StartupError: no compiler has one of the names; the message lists the compilers.
    """
    by_name: dict[str, Compiler] = {compiler.name: compiler for compiler in registry.compilers}
    for name in config.compilers:
        if name not in by_name:
            installed = ", ".join(sorted(by_name)) or "none"
            raise StartupError(
                f"no installed plugin has the compiler {name!r} (compilers: {installed}). Compilers come with plugins, such as those in "
                "plugins/compilers of the checkout; `djinn plugins` shows what is installed"
            )
    return tuple(by_name[name] for name in config.compilers)


def begin_strategies(
    context: ExecutorContext, strategies: Sequence[RunStrategy], compilers: tuple[Compiler, ...] = ()
) -> None:
    """Start strategies. Add the strategies whose `begin` returns True to the device's arbiter.

    Raises:
        StartupError: a strategy and another option of the executor exclude each other.
    """
    device = context.device
    for strategy in strategies:
        try:
            is_active = strategy.begin(StrategyContext(device, compilers))
        except StartupError:
            raise
        except Exception as error:
            _log.warning("a run strategy is not used: it failed to begin", strategy=strategy.name, error=repr(error))
            continue
        if is_active:
            device.arbiter.register(strategy)
