"""The command `djinn`. Each subcommand lives in a module of its own, imported when it is asked for."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from djinn_core.errors import ConfigurationError, DjinnError

if TYPE_CHECKING:
    from djinn_core.registry.commands import PluginCommands
    from djinn_core.registry.report import PluginRow

# Name, module, function and summary of each subcommand.
_SUBCOMMANDS = {
    "explain-error": ("djinn_core.cli.explain_error:command", "Show causes and cures of an error."),
    "plugins": ("djinn_core.cli.plugins:command", "List the plugins, built-in, installed and broken ones."),
    "serve": ("djinn_server.cli.serve:command", "Offer this machine's devices to clients."),
    "token": ("djinn_server.cli.token:command", "Make, list and revoke the tokens of a server's tenants."),
}
COMMANDS = {name: summary for name, (place, summary) in _SUBCOMMANDS.items() if find_spec(place.partition(".")[0])}

# The commands of packages of Djinn's repository, so that a command whose package is missing is not an unknown word.
_OF_PACKAGES = {
    "plugins/commands": "connect demo disconnect doctor explain fetch jobs kill login logout logs plan published run servers status stop submit",
    "djinn_server": "serve token",
}
PACKAGES = {name: folder for folder, names in _OF_PACKAGES.items() for name in names.split()}


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they run, so that `djinn --help` does not wait for PyTorch.

    Besides the core's subcommands it has those of plugins, which are looked for where one of them is named or all are listed.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands."""
        del ctx
        return sorted({*COMMANDS, *_every_command().commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand of that name, imported now."""
        if cmd_name in COMMANDS:
            module, _, function = _SUBCOMMANDS[cmd_name][0].partition(":")
            command: click.Command = getattr(importlib.import_module(module), function)
            return command
        return _offered(ctx).commands.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Like click's, with a suggestion for a name that is nearly right, and what plugins have to do with it."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            if args[0] in PACKAGES:
                ctx.fail(" ".join([_to_install(args[0]), *_absent(_offered(ctx))]))
            there = sorted({*COMMANDS, *_offered(ctx).commands})
            close = difflib.get_close_matches(args[0], sorted({*there, *PACKAGES}), 1)
            hint = f"Did you mean '{close[0]}'?" if close else f"The commands are {', '.join(there)}."
            ctx.fail(" ".join([f"There is no command '{args[0]}'. {hint}", *_absent(_offered(ctx))]))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of subcommands, without importing the core's; below it, plugins that cannot say theirs."""
        del ctx
        found = _every_command()
        summaries = {name: one.get_short_help_str(_WIDTH) for name, one in found.commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted({**summaries, **COMMANDS}.items()))
        for failure in found.failures:
            formatter.write_paragraph()
            formatter.write_text(f"{failure.error}.")

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand; an error of Djinn's, and any error of a plugin's command, becomes one message and exit code 1."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            owner = _offered(ctx).owners.get(ctx.invoked_subcommand or "") if _PLUGINS in ctx.meta else None
            if os.environ.get("DJINN_DEBUG") or not (owner or isinstance(error, DjinnError)):
                raise
            if owner is None or isinstance(error, DjinnError):
                raise click.ClickException(_with_code(error)) from error
            raise click.ClickException(_of_plugin(ctx, owner, error)) from error


_WIDTH = 100  # of summaries
_PLUGINS = "djinn.commands of plugins"  # where a context keeps them


def _every_command() -> PluginCommands:
    """Commands of all plugins, whatever the settings say: they may be wrong."""
    from djinn_core.registry.commands import find_commands
    from djinn_core.registry.selection import Selection

    return find_commands(Selection(), COMMANDS)


def _offered(ctx: click.Context) -> PluginCommands:
    """Commands of plugins, looked for once. If a setting is wrong, those of all plugins: `doctor` says what is wrong."""
    if _PLUGINS not in ctx.meta:
        from djinn_core.registry.commands import find_commands
        from djinn_core.registry.selection import Selection
        from djinn_core.settings import resolve

        selection = Selection()
        with contextlib.suppress(ConfigurationError):  # `_prepare` raises it
            selection = Selection.from_settings(resolve().settings)
        if selection.plugins:
            _find_in_working_directory()
        ctx.meta[_PLUGINS] = find_commands(selection, COMMANDS)
    found: PluginCommands = ctx.meta[_PLUGINS]
    return found


def _to_install(command: str) -> str:
    place = PACKAGES[command]
    if place == "djinn_server":
        from djinn_core.registry.embedded_executors import INSTALL_SERVER

        return f"`djinn {command}` is in the package djinn-server, which is not installed. {INSTALL_SERVER}"
    return (
        f"`djinn {command}` is in a package of Djinn's repository that is not in use: `pip install ./{place}` in a "
        "checkout. `djinn plugins` shows what is installed, disabled or broken."
    )


def _absent(offered: PluginCommands) -> list[str]:
    """Sentences about plugins whose commands are not there."""
    told = [str(failure.error).rstrip(".") + "." for failure in offered.failures]
    if offered.disabled:
        told.append(f"The setting `disable` leaves out the commands of {', '.join(offered.disabled)}.")
    return told


def _with_code(error: Exception) -> str:
    """The message of an error, and where causes and cures are; those of the command line's own mistakes say both."""
    if not isinstance(error, DjinnError) or isinstance(error, ConfigurationError):
        return str(error)
    return f"{error}\n`djinn explain-error {error.code}` shows causes and cures."


def _of_plugin(ctx: click.Context, owner: PluginRow, error: Exception) -> str:
    """Message for what a command of a plugin raised and should not have."""
    from djinn_core.registry.loading import shown

    package = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    if package.startswith("djinn_"):
        return (
            f"`djinn {ctx.invoked_subcommand}` needs the package {package.replace('_', '-')}, which is not installed: run "
            f"`pip install ./plugins/{package.removeprefix('djinn_')}` in a checkout of Djinn's repository."
        )
    return (
        f"`djinn {ctx.invoked_subcommand}`, a command of {owner.label}, raised {shown(error)}. "
        "DJINN_DEBUG=plugins shows the traceback, which is of use to its author."
    )


def _find_in_working_directory() -> None:
    """Modules there can be named as plugins, as with `python -m`; last, so that none stands in for another module."""
    with contextlib.suppress(FileNotFoundError):  # the directory was removed
        here = str(Path.cwd())
        if not {"", here} & {*sys.path}:
            sys.path.append(here)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="djinn", prog_name="djinn")
def main() -> None:
    """A remote accelerator as a local PyTorch device.

    Settings come from flags, then the environment (DJINN_<NAME>), then a TOML file; `djinn doctor --all` shows which won.
    """
    # A mistake in the environment or the file is told before any work starts; `doctor` reports it itself.
    _prepare()


def _prepare() -> None:
    from djinn_core import logs
    from djinn_core.settings import resolve

    logs.show("warning")
    context = click.get_current_context()
    if _PLUGINS in context.meta:
        for failure in _offered(context).failures:
            failure.warn_of_hook()
    try:
        settings = resolve().settings
        logs.set_debug_level(settings.debug)
        if settings.plugins:
            _find_in_working_directory()
    except ConfigurationError:
        if context.invoked_subcommand != "doctor":
            raise
