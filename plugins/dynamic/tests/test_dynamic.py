from __future__ import annotations

import pytest

import djinn_dynamic
from djinn.testing import PluginConformance, SchedulerConformance
from djinn_dynamic import Dynamic


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_dynamic


class TestScheduler(SchedulerConformance):
    @pytest.fixture
    def scheduler(self):
        return Dynamic()
