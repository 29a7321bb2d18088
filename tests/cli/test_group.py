"""The command `djinn` as a whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from djinn_core.cli import COMMANDS, PACKAGES, main
from djinn_core.errors import TransportError
from djinn_core.registry.commands import find_commands
from djinn_core.registry.selection import Selection


@pytest.fixture
def failing(monkeypatch):
    @click.command()
    def command():
        raise TransportError("No server answers at tcp://x:1: start `djinn serve` there.")

    monkeypatch.setitem(sys.modules, "djinn_core.cli.plugins", SimpleNamespace(command=command))


def run(*arguments, **environ):
    return CliRunner().invoke(main, arguments, env={"XDG_CONFIG_HOME": "/nonexistent", **environ})


def test_help_lists_every_command():
    shown = run("--help").output
    assert all(name in shown and summary in shown for name, summary in COMMANDS.items())


def test_help_and_version_do_not_import_torch():
    script = (
        "import sys; from djinn_core.cli import main\n"
        "for flag in ('--help', '--version'):\n    main([flag], standalone_mode=False)\n"
        "assert not {'torch', 'numpy', 'rich'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "djinn, version 26." in done.stdout


@pytest.mark.parametrize("name", sorted({*COMMANDS, *PACKAGES}))
def test_each_command_has_help(name):
    done = run(name, "--help")
    assert done.exit_code == 0
    assert f"Usage: main {name}" in done.output


def test_misspelt_command_is_suggested():
    done = run("serv")
    assert done.exit_code == 2
    assert "Did you mean 'serve'?" in done.output


def test_command_of_disabled_package_names_package():
    for name, place in PACKAGES.items():
        if name in COMMANDS:
            continue  # `djinn_server` is installed here
        assert (Path(__file__).parents[2] / place / "pyproject.toml").exists()
        done = run(name, DJINN_DISABLE="connect,demo,planning,run,servers")
        assert done.exit_code == 2
        assert f"pip install ./{place}" in done.output


def test_commands_of_missing_package_are_known():
    owners = find_commands(Selection(), COMMANDS).owners
    offered = {name for name, row in owners.items() if row.distribution == "djinn-commands"}
    assert offered == {name for name, folder in PACKAGES.items() if folder == "plugins/commands"}


def test_command_error_is_one_message_and_exit_code_1(failing):
    done = run("plugins", DJINN_DEBUG="")
    assert done.exit_code == 1
    assert done.output == (
        "Error: No server answers at tcp://x:1: start `djinn serve` there.\n"
        "`djinn explain-error transport` shows causes and cures.\n"
    )


def test_debug_option_shows_traceback(failing):
    done = run("plugins", DJINN_DEBUG="runtime")
    assert isinstance(done.exception, TransportError)


def test_invalid_setting_stops_commands_except_doctor():
    assert "must be a whole number" in run("plugins", DJINN_THREADS="x").output
    done = run("doctor", "--json", DJINN_THREADS="x")
    assert done.exit_code == 1
    assert '"well": false' in done.output


def test_python_dash_m_djinn_runs_command_line():
    """The process restarts as the command and keeps the interpreter's options."""
    command = [sys.executable, "-X", "dev", "-P", "-m", "djinn", "serv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert "Did you mean 'serve'?" in done.stderr


def test_plugin_in_working_directory_is_found(python, tmp_path, plain_environment):
    (tmp_path / "here_only.py").write_text("djinn_api_version = '2.0'\n")
    script = Path(sys.executable).with_name("djinn")
    environment = plain_environment | {"DJINN_PLUGINS": "here_only"}
    done = python.run(script, "plugins", "--json", cwd=tmp_path, env=environment)
    row = next(row for row in json.loads(done.stdout) if row["name"] == "here_only")
    assert "it implements no hook of Djinn" in row["error"]  # so it was imported


def test_missing_trace_folder_fails_before_script(tmp_path):
    (tmp_path / "script.py").write_text("raise AssertionError('it ran')")
    answer = CliRunner().invoke(
        main, ["run", "--trace", str(tmp_path / "none" / "t.json"), str(tmp_path / "script.py")]
    )
    assert answer.exit_code == 2
    assert "There is no folder" in answer.output
