import djinn_example
import pytest
import torch

from djinn.testing import DeviceConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestDevice(DeviceConformance):
    @pytest.fixture
    def device(self):
        return djinn_example.ExampleDevice()


def test_bytes_are_counted():
    runtime = djinn_example.ExampleDevice().open(0)
    runtime.deliver(runtime.receive(torch.zeros(100, dtype=torch.uint8)))
    assert (runtime.bytes_received, runtime.bytes_delivered) == (100, 100)
