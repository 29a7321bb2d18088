import djinn_example
import pytest

from djinn.testing import PluginConformance, RouterConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestRouter(RouterConformance):
    @pytest.fixture
    def router(self):
        return djinn_example.ExampleRouter()
