import djinn_example
import pytest

from djinn.testing import ChannelConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestChannels(ChannelConformance):
    @pytest.fixture
    def wrapper(self):
        return djinn_example.ExampleChannels()
