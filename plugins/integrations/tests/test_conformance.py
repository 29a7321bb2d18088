"""The conformance suites."""

from __future__ import annotations

import pytest

from djinn.testing import IntegrationConformance, OpHandlerConformance, PluginConformance
from djinn_integrations import (
    accelerate,
    client_fallback,
    collectives,
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
    client_fallback,
    collectives,
    diffusers,
    dynamo,
    hf_transformers,
    late_stop,
    lightning,
    safetensors,
    sentence_transformers,
]
HANDLING = [client_fallback, collectives]
INTEGRATIONS = [
    integration for plugin in PLUGINS if plugin not in HANDLING for integration in plugin.djinn_register_integrations()
]


class TestPlugin(PluginConformance):
    @pytest.fixture(params=PLUGINS, ids=lambda plugin: plugin.__name__.rpartition(".")[2])
    def plugin(self, request):
        return request.param


class TestIntegrations(IntegrationConformance):
    @pytest.fixture(params=INTEGRATIONS, ids=lambda integration: integration.module)
    def integration(self, request):
        return request.param


class TestOpHandlers(OpHandlerConformance):
    @pytest.fixture(params=HANDLING, ids=lambda plugin: plugin.__name__.rpartition(".")[2])
    def op_handler(self, request):
        (found,) = request.param.djinn_register_op_handlers()
        return found
