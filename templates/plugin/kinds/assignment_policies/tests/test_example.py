import djinn_example
import pytest

from djinn.hooks import AssignmentRequest, ExecutorLoad
from djinn.testing import AssignmentPolicyConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestAssignmentPolicy(AssignmentPolicyConformance):
    @pytest.fixture
    def policy(self):
        return djinn_example.ExamplePolicy()


def test_most_free_memory_counts():
    executors = (ExecutorLoad(0, memory_free=1), ExecutorLoad(1, memory_free=2), ExecutorLoad(2))
    assert djinn_example.ExamplePolicy().assign(AssignmentRequest("alice", executors)) == 1
