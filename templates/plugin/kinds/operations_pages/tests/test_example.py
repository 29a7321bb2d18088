import djinn_example
import pytest

from djinn.hooks import Identity, PageRequest, WatchedServer
from djinn.testing import OperationsPagesConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestPages(OperationsPagesConformance):
    @pytest.fixture
    def pages(self):
        return djinn_example.ExamplePages()


def test_sessions_are_those_of_the_tenant():
    pages = djinn_example.ExamplePages()
    pages.begin(WatchedServer(lambda tenant: {"executors": [{"sessions": [{"session": f"of {tenant}"}]}]}))
    assert pages.answer(PageRequest("/sessions", Identity("alice"))).body == b'["of alice"]'
