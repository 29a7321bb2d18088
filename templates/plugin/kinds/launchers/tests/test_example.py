import djinn_example
import pytest

from djinn.testing import LauncherConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestLauncher(LauncherConformance):
    @pytest.fixture
    def launcher(self):
        return djinn_example.ExampleLauncher()
