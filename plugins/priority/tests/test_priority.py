from __future__ import annotations

import pytest

import djinn_priority
from djinn.testing import PluginConformance, SchedulerConformance
from djinn_priority import Priority


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_priority


class TestScheduler(SchedulerConformance):
    @pytest.fixture
    def scheduler(self):
        return Priority()
