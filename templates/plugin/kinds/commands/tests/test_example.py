import djinn_example
import pytest
from click.testing import CliRunner

import djinn
from djinn.testing import CommandConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestCommand(CommandConformance):
    @pytest.fixture
    def command(self):
        return djinn_example.command

    @pytest.fixture
    def plugin(self):
        return djinn_example


def test_it_names_the_device():
    djinn.configure(executor="inline")
    done = CliRunner().invoke(djinn_example.command, ["--short"])
    assert done.exit_code == 0, done.output
    assert done.output == f"{djinn.topology().devices[0].id}\n"
