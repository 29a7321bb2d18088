"""Commands of plugins: listed without PyTorch, run with their errors named after the plugin, refused where a name is taken."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from djinn_core.cli import COMMANDS
from djinn_core.registry.commands import PluginCommands, find_commands
from djinn_core.registry.selection import Selection

COMMAND = """
import click, pluggy
hookimpl = pluggy.HookimplMarker("djinn")
djinn_api_version = "2.0"
@click.command("{name}")
@click.option("--fail", is_flag=True)
@click.option("--refuse", is_flag=True)
def command(fail, refuse):
    "Greet the {name}. And more."
    if refuse:
        from djinn_core.errors import TransportError
        raise TransportError("No server answers.")
    if fail:
        raise KeyError("a mistake")
    click.echo("hello, {name}")
@hookimpl
def djinn_register_commands():
    return [command]
"""
Djinn = Callable[..., Any]


@pytest.fixture
def install_commands(site: Path) -> Callable[..., None]:
    """Return a function that installs a plugin with commands."""

    def install_commands(name: str, source: str, groups: tuple[str, ...] = ("djinn.commands",)) -> None:
        (site / f"plugin_{name}.py").write_text(source)
        metadata = site / f"dist_{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.0\n")
        lines = [f"[{group}]\n{name} = plugin_{name}\n" for group in groups]
        (metadata / "entry_points.txt").write_text("\n".join(lines))

    return install_commands


@pytest.fixture
def command_points(site: Path) -> Callable[[], list[Any]]:
    """Return a function that returns the entry points of commands that the test installed."""
    return lambda: [
        point
        for distribution in importlib.metadata.distributions(path=[str(site)])
        for point in distribution.entry_points
        if point.group == "djinn.commands"
    ]


@pytest.fixture
def find_installed(command_points: Callable[[], list[Any]]) -> Callable[..., PluginCommands]:
    """Return a function that finds the commands that the test installed."""
    return lambda **selection: find_commands(Selection(**selection), COMMANDS, command_points())


@pytest.fixture
def djinn(python: Any, site: Path, plain_environment: dict[str, str]) -> Djinn:
    """Return a function that runs the command `djinn` with the plugins that the test installed."""

    def djinn(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        environment = plain_environment | {"PYTHONPATH": path, "COLUMNS": "300"} | environ
        done: subprocess.CompletedProcess[str] = python.run("-m", "djinn_core.cli", *arguments, env=environment)
        return done

    return djinn


def test_command_is_listed_without_pytorch(install_commands: Any, djinn: Djinn) -> None:
    install_commands("world", COMMAND.format(name="world"))
    helped = djinn("--help")
    assert re.search(r"^  world +Greet the world\.$", helped.stdout, re.MULTILINE)
    assert (helped.returncode, helped.stderr) == (0, "")
    done = djinn("world")
    assert (done.stdout, done.stderr) == ("hello, world\n", "")
    assert "Did you mean 'world'?" in djinn("wrld").stderr


def test_command_error_names_plugin(install_commands: Any, djinn: Djinn) -> None:
    install_commands("world", COMMAND.format(name="world"))
    failed = djinn("world", "--fail")
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    assert line.startswith(
        "Error: `djinn world`, a command of plugin 'world' (dist-world 1.0), raised KeyError: 'a mistake'"
    )
    assert "plugin_world.py:" in line
    traced = djinn("world", "--fail", DJINN_DEBUG="plugins")
    assert traced.stderr.splitlines()[-1] == "KeyError: 'a mistake'"
    refused = djinn("world", "--refuse")
    assert (refused.returncode, refused.stderr) == (
        1,
        "Error: No server answers.\n`djinn explain-error transport` shows causes and cures.\n",
    )
    unknown = djinn("world", "--unknown")
    assert unknown.returncode == 2
    assert "No such option" in unknown.stderr


def test_duplicate_command_name_is_refused(install_commands: Any, find_installed: Any) -> None:
    install_commands("ant", COMMAND.format(name="greet"))
    install_commands("bee", COMMAND.format(name="greet"))
    install_commands("cow", COMMAND.format(name="serve"))
    there = find_installed()
    assert {name: row.name for name, row in there.owners.items()} == {"greet": "ant"}
    messages = [str(failure.error) for failure in there.failures]
    assert len(messages) == 2
    assert "the name 'greet' among commands is taken twice: plugin 'ant' (dist-ant 1.0) has it" in messages[0]
    assert "plugin 'bee' (dist-bee 1.0) is refused" in messages[0]
    taken = f"the name 'serve' among commands is taken twice: plugin 'djinn' (djinn {importlib.metadata.version('djinn')}) has it"
    assert taken in messages[1]


def test_command_conflict_is_reported(install_commands: Any, djinn: Djinn) -> None:
    install_commands("ant", COMMAND.format(name="greet"))
    install_commands("bee", COMMAND.format(name="greet"))
    done = djinn("greet")
    assert done.stdout == "hello, greet\n"
    assert "plugin 'bee' (dist-bee 1.0) is refused" in done.stderr


def test_failing_command_plugin_is_named(install_commands: Any, djinn: Djinn) -> None:
    install_commands("world", COMMAND.format(name="world"))
    install_commands("broken", "raise OSError('no wings')")
    install_commands("vague", COMMAND.format(name="vague").replace("return [command]", "return [command.callback]"))
    helped = " ".join(djinn("--help").stdout.split())
    assert "Greet the world." in helped
    assert "plugin 'broken' (dist-broken 1.0) cannot be used: importing it raised OSError: no wings" in helped
    missing = djinn("vague").stderr
    assert "There is no command 'vague'." in missing
    assert "derive its class from click.Command" in missing
    assert "importing it raised OSError: no wings" in missing


def test_disable_setting_removes_commands(install_commands: Any, djinn: Djinn) -> None:
    install_commands("world", COMMAND.format(name="world"))
    refused = djinn("world", DJINN_DISABLE="world").stderr
    assert "The setting `disable` disables the commands of world." in refused
    assert djinn("world", DJINN_PLUGINS="").stdout == "hello, world\n"


def test_configured_modules_may_have_commands(site: Path, djinn: Djinn) -> None:
    (site / "here_only.py").write_text(COMMAND.format(name="here"))
    assert djinn("here", DJINN_PLUGINS="here_only,missing_one").stdout == "hello, here\n"


def test_plugins_without_commands_are_not_imported(install_commands: Any, djinn: Djinn) -> None:
    install_commands("world", COMMAND.format(name="world"))
    install_commands("heavy", "print('imported')", groups=("djinn.patterns",))
    assert djinn("world").stdout == "hello, world\n"
    assert "imported" not in djinn("--help").stdout


def test_help_ignores_invalid_settings(install_commands: Any, djinn: Djinn) -> None:
    install_commands("world", COMMAND.format(name="world"))
    assert "Greet the world." in djinn("--help", DJINN_THREADS="x").stdout
    assert "must be a whole number" in djinn("world", DJINN_THREADS="x").stderr
