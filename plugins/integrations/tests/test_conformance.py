"""The conformance suites."""

from __future__ import annotations

import pytest

from djinn.testing import IntegrationConformance, PluginConformance
from djinn_integrations import (
    accelerate,
    diffusers,
    dynamo,
    hf_transformers,
    late_stop,
    lightning,
    safetensors,
    sentence_transformers,
)

PLUGINS = [
    accelerate,
    diffusers,
    dynamo,
    hf_transformers,
    late_stop,
    lightning,
    safetensors,
    sentence_transformers,
]
INTEGRATIONS = [integration for plugin in PLUGINS for integration in plugin.djinn_register_integrations()]


class TestPlugin(PluginConformance):
    @pytest.fixture(params=PLUGINS, ids=lambda plugin: plugin.__name__.rpartition(".")[2])
    def plugin(self, request):
        return request.param


class TestIntegrations(IntegrationConformance):
    @pytest.fixture(params=INTEGRATIONS, ids=lambda integration: integration.module)
    def integration(self, request):
        return request.param
