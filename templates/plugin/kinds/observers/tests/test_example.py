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


def test_seconds_are_added_up_by_tenant():
    observer = djinn_example.ExampleObserver()
    for tenant, duration in (("alice", 0.5), ("bob", 1.0), ("alice", 0.25)):
        observer.observe(Event("completed", 1.0, "executor", {"tenant": tenant, "duration": duration}))
    observer.observe(Event("completed", 1.0, "client", {"execute": 2.0}))
    assert observer.seconds == {"alice": 0.75, "bob": 1.0, "": 2.0}
