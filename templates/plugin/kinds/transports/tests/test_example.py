import djinn_example
import pytest

from djinn.testing import PluginConformance, TransportConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestTransport(TransportConformance):
    @pytest.fixture
    def transport(self):
        return djinn_example.ExampleTransport()

    @pytest.fixture
    def listen_url(self):
        return "djinn-example://127.0.0.1:0"
