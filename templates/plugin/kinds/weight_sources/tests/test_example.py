import djinn_example
import pytest

from djinn.hooks import WeightPermissions
from djinn.testing import PluginConformance, WeightSourceConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestWeightSource(WeightSourceConformance):
    @pytest.fixture
    def source(self):
        return djinn_example.ExampleSource()

    @pytest.fixture
    def place(self, tmp_path):
        def place(data):
            (tmp_path / "model").mkdir()
            (tmp_path / "model" / "model.safetensors").write_bytes(data)
            return "example:model", WeightPermissions((tmp_path,))

        return place
