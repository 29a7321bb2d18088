"""Conformance suite for optimizations; what it does over executors is in Djinn's own tests."""

from __future__ import annotations

import pytest

import djinn_prefill
from djinn.testing import OptimizationConformance, PluginConformance
from djinn_prefill import DivideSequences


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_prefill


class TestConforms(OptimizationConformance):
    @pytest.fixture
    def optimization(self):
        return DivideSequences()
