import djinn_example
import pytest

from djinn.testing import PlacementPolicyConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestPolicy(PlacementPolicyConformance):
    @pytest.fixture
    def policy(self):
        return djinn_example.ExamplePolicy()
