import djinn_example
import pytest

from djinn.testing import InterceptionConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestInterception(InterceptionConformance):
    @pytest.fixture
    def interception(self):
        return djinn_example.ExampleInterception()
