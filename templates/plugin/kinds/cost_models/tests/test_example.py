import djinn_example
import pytest

from djinn.planning import DeviceCapabilities
from djinn.testing import CostModelConformance, PluginConformance, ProgramBuilder


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestCostModel(CostModelConformance):
    @pytest.fixture
    def cost_model(self):
        return djinn_example.ExampleCostModel()


def test_a_product():
    builder = ProgramBuilder()
    builder.op("aten::mm", builder.input(2, 3), builder.input(3, 4), shape=(2, 4))
    graph = builder.graph()
    device = DeviceCapabilities("server/cpu:0", "cpu")
    estimate = djinn_example.ExampleCostModel().estimate(graph, graph.nodes[0], device)
    assert estimate.flops == 2 * 2 * 3 * 4
