import importlib.util

import djinn_example
import pytest

from djinn.testing import IntegrationConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestIntegration(IntegrationConformance):
    @pytest.fixture(params=djinn_example.djinn_register_integrations(), ids=lambda integration: integration.module)
    def integration(self, request):
        return request.param


def test_data_that_is_here_is_averaged_as_before():
    spec = importlib.util.find_spec("statistics")
    module = importlib.util.module_from_spec(spec)  # a copy of its own, which no other test sees
    spec.loader.exec_module(module)
    djinn_example.adapt_statistics(module)
    assert module.fmean([1, 2, 6]) == 3
    assert module.fmean([1, 3], weights=[3, 1]) == 1.5
