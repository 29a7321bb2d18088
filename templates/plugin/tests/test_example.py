import djinn_example
import pytest
import torch

import djinn
from djinn.testing import PatternConformance, PluginConformance, ProgramBuilder


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestPattern(PatternConformance):
    @pytest.fixture
    def pattern(self):
        return djinn_example.PATTERN

    @pytest.fixture
    def recognised(self):
        builder = ProgramBuilder()
        product = builder.op("aten::mm", builder.input(2, 3), builder.input(3, 4), shape=(2, 4))
        product = builder.view("aten::view", product, shape=(4, 2))
        builder.op("aten::relu", product, shape=(4, 2))
        return {"a product and a ReLU": builder.graph()}


def test_a_layer_of_a_model():
    with torch.device("meta"):
        layer, x = torch.nn.Linear(3, 4), torch.zeros(2, 3)
    djinn.configure(plugins=[djinn_example])
    with djinn.capture() as captured:
        y = torch.relu(layer(x))
    assert y.shape == (2, 4)
    assert [(match.pattern, match.details) for match in captured.patterns] == [(djinn_example.name, {"features": 4})]


def test_a_relu_of_something_else_is_left_alone():
    builder = ProgramBuilder()
    builder.op("aten::relu", builder.op("aten::neg", builder.input(2, 3), shape=(2, 3)), shape=(2, 3))
    graph = builder.graph()
    assert not list(djinn_example.PATTERN.match(graph, [node for node in graph.nodes if node.operation == "relu"]))
