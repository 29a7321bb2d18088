import djinn_example
import pytest

from djinn.hooks import Event
from djinn.testing import ObserverConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestObserver(ObserverConformance):
    @pytest.fixture
    def observer(self):
        return djinn_example.ExampleObserver()


def test_events_are_counted():
    observer = djinn_example.ExampleObserver()
    observer.observe(Event("completed", 1.0, {"duration": 0.5}))
    observer.observe(Event("completed", 2.0, {"duration": 0.25}))
    assert observer.counts["completed"] == 2
    assert observer.seconds["completed"] == 0.75
