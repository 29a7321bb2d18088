"""Conformance suite for commands of the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from types import ModuleType

import pytest
from click import Command
from click.testing import CliRunner

from djinn.testing.suite import SECONDS, Ending, missing, require_protocol

_LISTED = (
    "import importlib, sys; importlib.import_module({module!r}).djinn_register_commands(); "
    "print(*({{'torch', 'djinn', 'numpy'}} & {{*sys.modules}}))"
)


class CommandConformance(Ending):
    """Tests that every command must pass.

    Subclass this class and define the fixtures `command` and `plugin`. `plugin` is the module that registers the
    command.
    """

    @pytest.fixture
    def command(self) -> Command:
        """Return the command under test."""
        return missing(self, "command", "your command, as click made it")  # type: ignore[return-value]

    @pytest.fixture
    def plugin(self) -> ModuleType:
        """Return the module that an entry point of the group `djinn.commands` names."""
        return missing(self, "plugin", "the module that registers it")  # type: ignore[return-value]

    def test_command_has_name_and_summary(self, command: Command) -> None:
        """The name of the command can be typed, and the command has a summary for the list of commands."""
        require_protocol(command, "commands")
        name = command.name or ""
        assert re.fullmatch(r"[a-z][a-z0-9_-]*", name), f"name {name!r}: use a-z, 0-9, - and _ after a letter"
        assert command.get_short_help_str(), f"`djinn {name}` has no summary: give its function a docstring"

    def test_hook_returns_the_command(self, command: Command, plugin: ModuleType) -> None:
        """The plugin's hook returns the command."""
        names = [registered.name for registered in plugin.djinn_register_commands()]
        assert command.name in names, f"{plugin.__name__} registers {names}"

    def test_help_exits_zero_and_prints_usage(self, command: Command) -> None:
        """`--help` prints the usage, and the command does not run."""
        result = CliRunner().invoke(command, ["--help"])
        assert result.exit_code == 0, result.output
        assert "Usage:" in result.output

    def test_unknown_options_are_refused(self, command: Command) -> None:
        """An unknown option gives click's error message and the exit code 2."""
        if command.ignore_unknown_options:
            pytest.skip("it hands options on")
        result = CliRunner().invoke(command, ["--no-option-of-any-command"])
        assert result.exit_code == 2, result.output

    def test_module_imports_neither_torch_nor_djinn(self, plugin: ModuleType) -> None:
        """The plugin's module imports neither PyTorch nor `djinn`, because `djinn --help` imports the module."""
        script = _LISTED.format(module=plugin.__name__)
        process = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=4 * SECONDS, check=False
        )
        assert process.returncode == 0, process.stderr
        assert not process.stdout.split(), f"importing the plugin also imports {process.stdout.strip()}"
