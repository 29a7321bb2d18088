import djinn_example
import pytest

from djinn.testing import ExecutorConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestEngine(ExecutorConformance):
    @pytest.fixture
    def engine(self):
        return djinn_example.ExampleEngine()
