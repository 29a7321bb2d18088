import io

import djinn_example
import numpy
import pytest

from djinn.testing import PluginConformance, WeightFormatConformance


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
            written = io.BytesIO()
            numpy.savez(written, **{name: tensor.numpy() for name, tensor in tensors.items()})
            return written.getvalue()

        return make_file
