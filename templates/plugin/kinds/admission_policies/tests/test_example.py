import attrs
import djinn_example
import pytest

from djinn.testing import AdmissionPolicyConformance, PluginConformance, sample_requests


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestPolicy(AdmissionPolicyConformance):
    @pytest.fixture
    def policy(self):
        return djinn_example.ExamplePolicy(djinn_example.Settings())


def test_a_tenant_that_holds_too_much_comes_again_later():
    policy = djinn_example.ExamplePolicy(djinn_example.Settings(gib=1))
    request = sample_requests()["a session"]
    assert policy.decide(attrs.evolve(request, memory=2**30)) is None
    assert policy.decide(attrs.evolve(request, memory=2**30 + 1)).after == 10.0
