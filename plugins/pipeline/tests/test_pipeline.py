from __future__ import annotations

import pytest

import djinn_pipeline
from djinn.testing import PluginConformance, SchedulerConformance
from djinn_pipeline import Pipeline


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_pipeline


class TestScheduler(SchedulerConformance):
    @pytest.fixture
    def scheduler(self):
        return Pipeline()
