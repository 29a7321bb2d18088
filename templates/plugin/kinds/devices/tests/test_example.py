import djinn_example
import pytest

from djinn.testing import DeviceConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestDevice(DeviceConformance):
    @pytest.fixture
    def device(self):
        return djinn_example.ExampleDevice()
