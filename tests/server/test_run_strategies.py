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
def installed():
    return registry_with("batches", "compiled", "graphs")


def names(registry, **options):
    return [strategy.name for strategy in strategies_of(registry, ExecutorConfig(**options))]


def test_options_ask_for_strategies_and_those_that_join_sessions_come_first(installed):
    assert names(installed) == ["compiled"]
    assert names(installed, graphs=True) == ["compiled", "graphs"]
    other_order = SimpleNamespace(run_strategies=installed.run_strategies[::-1])
    assert names(other_order, batch_sessions=True)[0] == "batches"


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({}, []),
        ({"compilers": ("inductor",)}, ["--compile"]),
        ({"graphs": True, "batch_sessions": True}, ["--batch-sessions", "--graphs"]),
    ],
)
def test_an_option_without_its_strategy_is_one_line_and_programs_run_op_by_op(caplog, options, warned):
    registry = registry_with("inductor")
    context = ExecutorContext.of(CpuRuntime())
    config = ExecutorConfig(**options)
    begin_strategies(context, strategies_of(registry, config), compilers_of(registry, config))
    assert context.device.arbiter.strategies == []
    lines = [record.getMessage() for record in caplog.records]
    assert sorted(line.split()[0] for line in lines) == warned
    assert all("plugins/strategies of the checkout" in line and "\n" not in line for line in lines)


def test_compilers_that_are_not_asked_for_do_nothing(installed):
    context = ExecutorContext.of(CpuRuntime())
    begin_strategies(context, strategies_of(installed, ExecutorConfig()))
    assert [strategy.name for strategy in context.device.arbiter.strategies] == []


def test_a_strategy_that_has_nothing_to_do_on_a_device_is_not_asked():
    class Elsewhere(RunStrategy):
        name = "elsewhere"
        begun = 0

        def begin(self, context: StrategyContext) -> bool:
            self.begun += 1
            return context.device.runtime.device.type != "cpu"

        def acts_on(self, template):
            raise AssertionError(template)

    strategy, context = Elsewhere(), ExecutorContext.of(CpuRuntime())
    begin_strategies(context, [strategy])
    assert strategy.begun == 1
    assert context.device.arbiter.choice(b"", None) is None
