"""The conformance suites."""

from __future__ import annotations

import pytest

import djinn_lightning
from djinn.testing import IntegrationConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_lightning


class TestIntegrations(IntegrationConformance):
    @pytest.fixture(params=djinn_lightning.djinn_register_integrations(), ids=lambda integration: integration.module)
    def integration(self, request):
        return request.param
