import djinn_example
import pytest
import torch

from djinn.testing import PluginConformance, RunStrategyConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestStrategy(RunStrategyConformance):
    @pytest.fixture
    def strategy(self):
        return djinn_example.ExampleStrategy()

    @pytest.fixture
    def programs(self):
        x, y = torch.randn(16, 16), torch.randn(16, 16)
        return {
            "a residual": (lambda x, y: torch.relu(x * y + x) @ y, (x, y)),
            "several": (lambda x, y: torch.relu(torch.relu(x + y) + y), (x, y)),
        }
