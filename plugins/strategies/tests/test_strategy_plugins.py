"""The plugins of this package meet the contract of plugins."""

from __future__ import annotations

import pytest

from djinn.testing import PluginConformance
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.hookspecs.run_strategies import StrategyContext
from djinn_server.shared_device import SharedDevice
from djinn_strategies import batches, compiled, graphs
from djinn_strategies.graphs import GraphRecorder


@pytest.mark.parametrize("module", [batches, compiled, graphs], ids=lambda module: module.__name__)
class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self, module):
        return module


def test_graphs_strategy_requires_accelerator():
    assert not GraphRecorder().begin(StrategyContext(SharedDevice(CpuRuntime())))
