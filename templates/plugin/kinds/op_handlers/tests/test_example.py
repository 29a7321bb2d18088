import djinn_example
import pytest
import torch

from djinn.testing import OpHandlerConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestOpHandler(OpHandlerConformance):
    @pytest.fixture
    def op_handler(self):
        return djinn_example.ExampleOpHandler()

    def test_it_runs_an_op(self, op_handler):
        assert op_handler.run(torch.ops.aten.neg.default, (torch.ones(2),), {}).tolist() == [-1, -1]
