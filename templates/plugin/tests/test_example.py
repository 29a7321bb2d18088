import djinn_example
import pytest

from djinn.testing import PatternConformance, PluginConformance, ProgramBuilder


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestPattern(PatternConformance):
    @pytest.fixture
    def pattern(self):
        return djinn_example.ExamplePattern()

    @pytest.fixture
    def recognised(self):
        builder = ProgramBuilder()
        product = builder.op("aten::mm", builder.input(2, 3), builder.input(3, 4), shape=(2, 4))
        builder.op("aten::relu", product, shape=(2, 4))
        return {"a product and a ReLU": builder.graph()}


def test_a_product_with_two_users_is_left_alone():
    builder = ProgramBuilder()
    product = builder.op("aten::mm", builder.input(2, 3), builder.input(3, 4), shape=(2, 4))
    builder.op("aten::relu", product, shape=(2, 4))
    builder.op("aten::sum", product, shape=())
    graph = builder.graph()
    assert not list(djinn_example.ExamplePattern().match(graph, graph.nodes[:1]))
