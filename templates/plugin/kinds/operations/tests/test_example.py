import djinn_example
import pytest

from djinn.testing import OperationsServerConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestOperations(OperationsServerConformance):
    @pytest.fixture
    def operations(self):
        return djinn_example.ExampleOperations()
