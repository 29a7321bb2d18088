"""The conformance suites."""

from __future__ import annotations

import pytest

import djinn_hf_transformers
from djinn.testing import IntegrationConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_hf_transformers


class TestIntegrations(IntegrationConformance):
    @pytest.fixture(
        params=djinn_hf_transformers.djinn_register_integrations(), ids=lambda integration: integration.module
    )
    def integration(self, request):
        return request.param
