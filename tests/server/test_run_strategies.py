"""Which run strategies an executor has: those that act always, and those that its options ask for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.kinds import EXECUTOR_KINDS
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.context import ExecutorContext
from djinn_server.hookspecs.run_strategies import RunStrategy, StrategyContext
from djinn_server.launch.executor_config import ExecutorConfig
from djinn_server.run_strategies import begin_strategies, compilers_of, strategies_of


def registry_with(*plugins):
    return load_registry(Selection(plugins=plugins), builtins=builtin_plugins(), kinds=EXECUTOR_KINDS)


@pytest.fixture(scope="module")
def strategy_registry():
    return registry_with("batches", "compiled", "graphs")


def names(registry, **options):
    return [strategy.name for strategy in strategies_of(registry, ExecutorConfig(**options))]


def test_options_select_strategies_with_session_joining_first(strategy_registry):
    assert names(strategy_registry) == ["compiled"]
    assert names(strategy_registry, graphs=True) == ["compiled", "graphs"]
    other_order = SimpleNamespace(run_strategies=strategy_registry.run_strategies[::-1])
    assert names(other_order, batch_sessions=True)[0] == "batches"


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({}, []),
        ({"compilers": ("inductor",)}, ["--compile"]),
        ({"graphs": True, "batch_sessions": True}, ["--batch-sessions", "--graphs"]),
    ],
)
def test_option_without_its_strategy_logs_one_line(caplog, options, warned):
    registry = registry_with("inductor")
    context = ExecutorContext.of(CpuRuntime())
    config = ExecutorConfig(**options)
    begin_strategies(context, strategies_of(registry, config), compilers_of(registry, config))
    assert context.device.arbiter.strategies == []
    lines = [record.getMessage() for record in caplog.records]
    assert sorted(line.split()[0] for line in lines) == warned
    assert all("plugins/strategies of the checkout" in line and "\n" not in line for line in lines)


def test_unselected_compilers_do_nothing(strategy_registry):
    context = ExecutorContext.of(CpuRuntime())
    begin_strategies(context, strategies_of(strategy_registry, ExecutorConfig()))
    assert [strategy.name for strategy in context.device.arbiter.strategies] == []


def test_strategy_that_does_not_apply_to_device_is_not_called():
    class InapplicableStrategy(RunStrategy):
        name = "elsewhere"
        begun = 0

        def begin(self, context: StrategyContext) -> bool:
            self.begun += 1
            return context.device.runtime.device.type != "cpu"

        def acts_on(self, template):
            raise AssertionError(template)

    strategy, context = InapplicableStrategy(), ExecutorContext.of(CpuRuntime())
    begin_strategies(context, [strategy])
    assert strategy.begun == 1
    assert context.device.arbiter.choice(b"", None) is None
