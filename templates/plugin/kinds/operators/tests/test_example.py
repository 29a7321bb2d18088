import djinn_example
import pytest
import torch

from djinn.testing import OperatorLibraryConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestLibrary(OperatorLibraryConformance):
    @pytest.fixture
    def library(self):
        return djinn_example.ExampleLibrary()

    @pytest.fixture
    def calls(self):
        return {"example::scaled_sum": [(torch.randn(3, 4), torch.randn(3, 4), 0.5)]}


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        djinn_example.ExampleLibrary().check("example::scaled_sum", {"x": torch.ones(2), "y": torch.ones(3)})
