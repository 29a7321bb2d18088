import djinn_example
import pytest

from djinn.testing import (
    OptimizationConformance,
    PluginConformance,
    ProgramBuilder,
    optimization_context,
    sample_graphs,
)


def relu_of_relu():
    builder = ProgramBuilder()
    first = builder.op("aten::relu", builder.input(4), shape=(4,))
    second = builder.op("aten::relu", first, shape=(4,))
    builder.op("aten::neg", second, shape=(4,))
    builder.drop(first, second)
    return builder.graph()


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestOptimization(OptimizationConformance):
    @pytest.fixture
    def optimization(self):
        return djinn_example.ExampleOptimization()

    @pytest.fixture
    def graphs(self):
        return {**sample_graphs(), "relu of relu": relu_of_relu()}


def test_the_second_relu_goes():
    graph = relu_of_relu()
    result = djinn_example.ExampleOptimization().optimize(optimization_context(graph))
    assert result.applied
    assert result.rewrite.drop == {1}
    assert result.rewrite.replace == {graph.nodes[1].outputs[0]: graph.nodes[0].outputs[0]}
