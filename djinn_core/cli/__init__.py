"""The command `djinn`. Each subcommand lives in a module of its own, imported when it is asked for."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from djinn_core.errors import ConfigurationError, DjinnError

# Name and summary of each subcommand; `djinn_core.cli.<name>` offers it as `command`.
COMMANDS = {
    "calibrate": "Measure how fast a device is, once, for predictions.",
    "demo": "Show Djinn at work on this machine, no GPU needed.",
    "doctor": "Say what is wrong with this installation and how to mend it.",
    "explain": "Show what each stage decides about a script or a model, and why.",
    "kill": "End a session on a server.",
    "plan": "Plan a model for a cluster that is only described.",
    "plugins": "List the plugins, built-in, installed and broken ones.",
    "run": "Run a script written for CUDA on the remote device.",
    "serve": "Offer this machine's devices to clients.",
    "status": "Show a server's sessions, executors and memory.",
    "token": "Make, list and revoke the tokens of a server's tenants.",
    "validate": "Compare predicted with measured times.",
}


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they run, so that `djinn --help` does not wait for PyTorch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands."""
        del ctx
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand of that name, imported now."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"djinn_core.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Like click's, with a suggestion for a name that is nearly right."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            close = difflib.get_close_matches(args[0], COMMANDS, 1)
            hint = f"Did you mean '{close[0]}'?" if close else f"The commands are {', '.join(sorted(COMMANDS))}."
            ctx.fail(f"There is no command '{args[0]}'. {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of subcommands, without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand; an error of Djinn's becomes one message and exit code 1."""
        try:
            return super().invoke(ctx)
        except DjinnError as error:
            if os.environ.get("DJINN_DEBUG"):
                raise
            raise click.ClickException(str(error)) from error


def installed_version(distribution: str = "djinn") -> str:
    """Version of an installed distribution, or an empty string where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _find_in_working_directory() -> None:
    """Modules there can be named as plugins, as with `python -m`; last, so that none stands in for another module."""
    with contextlib.suppress(FileNotFoundError):  # the directory was removed
        here = str(Path.cwd())
        if not {"", here} & {*sys.path}:
            sys.path.append(here)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(installed_version() or "unknown", prog_name="djinn")
def main() -> None:
    """A remote accelerator as a local PyTorch device.

    Settings come from flags, then the environment (DJINN_<NAME>), then a TOML file; `djinn doctor` shows which won.
    """
    # A mistake in the environment or the file is told before any work starts; `doctor` reports it itself.
    _prepare()


def _prepare() -> None:
    from djinn_core import config, logs

    logs.show("warning")
    try:
        settings = config.resolve().settings
        logs.set_debug_level(settings.debug)
        if settings.plugins:
            _find_in_working_directory()
    except ConfigurationError:
        if click.get_current_context().invoked_subcommand != "doctor":
            raise
