import djinn_example
import pytest

from djinn.testing import PluginConformance, SchedulerConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestScheduler(SchedulerConformance):
    @pytest.fixture
    def scheduler(self):
        return djinn_example.ExampleScheduler()
