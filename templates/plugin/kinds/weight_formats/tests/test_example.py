import json

import djinn_example
import pytest

from djinn.testing import PluginConformance, WeightFormatConformance

ROOM = 1000  # bytes for the header


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestFormat(WeightFormatConformance):
    @pytest.fixture
    def form(self):
        return djinn_example.ExampleFormat()

    @pytest.fixture
    def make_file(self):
        def make_file(tensors):
            header, data = {}, b""
            for name, tensor in tensors.items():
                dtype = str(tensor.dtype).removeprefix("torch.")
                header[name] = dtype, tensor.shape, ROOM + len(data)
                data += tensor.numpy().tobytes()
            text = json.dumps(header).encode().ljust(ROOM - 8)
            return len(text).to_bytes(8, "little") + text + data

        return make_file
