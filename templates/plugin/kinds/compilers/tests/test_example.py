import djinn_example
import pytest

from djinn.testing import CompilerConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestCompiler(CompilerConformance):
    @pytest.fixture
    def compiler(self):
        return djinn_example.ExampleCompiler()
