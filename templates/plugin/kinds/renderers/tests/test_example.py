import djinn_example
import pytest
import torch

import djinn
from djinn.testing import PluginConformance, RendererConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestRenderer(RendererConformance):
    @pytest.fixture
    def renderer(self):
        return djinn_example.ExampleRenderer()


def test_each_op_has_a_line():
    with torch.device("meta"):
        layer, x = torch.nn.Linear(2, 2), torch.zeros(1, 2)
    with djinn.capture() as captured, torch.no_grad():
        layer(x)
    result = djinn.plan(captured, until="annotate")
    lines = djinn_example.ExampleRenderer().render(result).splitlines()
    assert len(lines) == 1 + len(captured.graph.nodes)
