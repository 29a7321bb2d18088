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
    candidates = sorted(sample_evictions(), key=djinn_example.ExamplePolicy().key, reverse=True)
    sizes = [candidate.nbytes for candidate in candidates]
    assert sizes == sorted(sizes, reverse=True)
