import djinn_example
import pytest

from djinn.testing import PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example
