from __future__ import annotations

import pytest

from djinn.testing import PluginConformance, SchedulerConformance
from djinn_schedulers import dynamic, parallel, pipeline, priority

PLUGINS = {"dynamic": dynamic, "parallel": parallel, "pipeline": pipeline, "priority": priority}


@pytest.fixture(params=sorted(PLUGINS))
def name(request):
    return request.param


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self, name):
        return PLUGINS[name]


class TestScheduler(SchedulerConformance):
    @pytest.fixture
    def scheduler(self, name):
        (scheduler,) = PLUGINS[name].djinn_register_schedulers()
        assert scheduler.name == name
        return scheduler
