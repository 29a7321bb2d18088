"""The plugins of this package as plugins, and as run strategies that meet the contract."""

from __future__ import annotations

import pytest
import torch

from djinn.testing import PluginConformance, RunStrategyConformance
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.hookspecs.run_strategies import StrategyContext
from djinn_server.shared_device import SharedDevice
from djinn_strategies import batches, compiled, graphs, packed_products
from djinn_strategies.graphs import GraphRecorder
from djinn_strategies.packed_products import PackedProducts


@pytest.mark.parametrize("module", [batches, compiled, graphs, packed_products], ids=lambda module: module.__name__)
class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self, module):
        return module


class TestPackedProducts(RunStrategyConformance):
    @pytest.fixture
    def strategy(self):
        return PackedProducts()

    @pytest.fixture
    def programs(self):
        x, weight = torch.randn(16, 64), torch.randn(64, 64) / 64
        return {"a linear layer": (lambda x, weight: torch.nn.functional.linear(x, weight).relu(), (x, weight))}


def test_packed_products_and_graphs_know_on_which_devices_they_act():
    device = SharedDevice(CpuRuntime())
    assert PackedProducts().begin(StrategyContext(device))
    assert not GraphRecorder().begin(StrategyContext(device)), "only an accelerator records graphs"
    device.arbiter.register(batches.Batches())
    assert not PackedProducts().begin(StrategyContext(device)), "batches pack weights of their own"
