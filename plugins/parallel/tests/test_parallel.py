from __future__ import annotations

import pytest

import djinn_parallel
from djinn.testing import PluginConformance, SchedulerConformance
from djinn_parallel import Parallel


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_parallel


class TestScheduler(SchedulerConformance):
    @pytest.fixture
    def scheduler(self):
        return Parallel()
