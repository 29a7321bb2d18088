import djinn_example
import pytest

from djinn.testing import MemoryPolicyConformance, PluginConformance, sample_evictions


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestMemoryPolicy(MemoryPolicyConformance):
    @pytest.fixture
    def policy(self):
        return djinn_example.ExamplePolicy()


def test_the_largest_goes_first():
    for context in sample_evictions().values():
        order = djinn_example.ExamplePolicy().order(context)
        sizes = [context.candidates[position].nbytes for position in order]
        assert sizes == sorted(sizes, reverse=True)
