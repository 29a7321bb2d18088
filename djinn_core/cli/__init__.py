"""The command `djinn`. Each subcommand has a module of its own, which is imported when the subcommand runs."""

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

from djinn_core.errors import ConfigurationError, DjinnError, install_hint

if TYPE_CHECKING:
    from djinn_core.registry.commands import PluginCommands
    from djinn_core.registry.report import PluginRow

# Name, module, function and summary of each subcommand.
_SUBCOMMANDS = {
    "explain-error": ("djinn_core.cli.explain_error:command", "Show causes and cures of an error."),
    "plugins": ("djinn_core.cli.plugins:command", "List built-in, installed and broken plugins."),
    "serve": ("djinn_server.cli.serve:command", "Offer this machine's devices to clients."),
    "token": ("djinn_server.cli.token:command", "Make, list and revoke the tokens of a server's tenants."),
}
COMMANDS = {name: summary for name, (folder, summary) in _SUBCOMMANDS.items() if find_spec(folder.partition(".")[0])}

# Commands of packages in Djinn's repository. If the package is missing, the command says so instead of "no such
# command".
_OF_PACKAGES = {
    "plugins/commands": "connect demo disconnect doctor explain fetch jobs kill login logout logs plan published run servers status stop submit",
    "djinn_server": "serve token",
}
PACKAGES = {name: folder for folder, names in _OF_PACKAGES.items() for name in names.split()}


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they run, so that `djinn --help` does not wait for PyTorch.

    The group includes the commands of plugins. Plugins are searched only to run a command of a plugin, or to list all
    commands.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands."""
        del ctx
        return sorted({*COMMANDS, *_every_command().commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the subcommand `cmd_name`."""
        if cmd_name in COMMANDS:
            module, _, function = _SUBCOMMANDS[cmd_name][0].partition(":")
            command: click.Command = getattr(importlib.import_module(module), function)
            return command
        return _plugin_commands(ctx).commands.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return click's resolution of the command line. For an unknown name, suggest a similar name.

        The error also names plugins whose commands failed to load.
        """
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            if args[0] in PACKAGES:
                ctx.fail(" ".join([_to_install(args[0]), *_broken_plugins(_plugin_commands(ctx))]))
            commands = sorted({*COMMANDS, *_plugin_commands(ctx).commands})
            close = difflib.get_close_matches(args[0], sorted({*commands, *PACKAGES}), 1)
            hint = f"Did you mean '{close[0]}'?" if close else f"The commands are {', '.join(commands)}."
            ctx.fail(" ".join([f"There is no command '{args[0]}'. {hint}", *_broken_plugins(_plugin_commands(ctx))]))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands without importing the core's modules.

        Below the list, name plugins whose commands failed to load.
        """
        del ctx
        commands = _every_command()
        summaries = {name: command.get_short_help_str(_WIDTH) for name, command in commands.commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted({**summaries, **COMMANDS}.items()))
        for failure in commands.failures:
            formatter.write_paragraph()
            formatter.write_text(f"{failure.error}.")

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand. Print an error of Djinn or of a plugin's command as one message, and exit with code 1."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            owner = _plugin_commands(ctx).owners.get(ctx.invoked_subcommand or "") if _PLUGINS in ctx.meta else None
            if os.environ.get("DJINN_DEBUG") or not (owner or isinstance(error, DjinnError)):
                raise
            if owner is None or isinstance(error, DjinnError):
                raise click.ClickException(_with_code(error)) from error
            raise click.ClickException(_plugin_failure(ctx, owner, error)) from error


_WIDTH = 100  # width of the summaries in characters
_PLUGINS = "djinn.commands of plugins"  # key of the cached commands in click's context


def _every_command() -> PluginCommands:
    """Return the commands of all plugins. Ignore settings, because they may be invalid."""
    from djinn_core.registry.commands import find_commands
    from djinn_core.registry.selection import Selection

    return find_commands(Selection(), COMMANDS)


def _plugin_commands(ctx: click.Context) -> PluginCommands:
    """Return the commands of the enabled plugins, from a cache.

    If a setting is invalid, return the commands of all plugins, so that `djinn doctor` can report the setting.
    """
    if _PLUGINS not in ctx.meta:
        from djinn_core.registry.commands import find_commands
        from djinn_core.registry.selection import Selection
        from djinn_core.settings import resolve

        selection = Selection()
        with contextlib.suppress(ConfigurationError):  # `_prepare` reports the error
            selection = Selection.from_settings(resolve().settings)
        if selection.plugins:
            _append_working_directory()
        ctx.meta[_PLUGINS] = find_commands(selection, COMMANDS)
    plugin_commands: PluginCommands = ctx.meta[_PLUGINS]
    return plugin_commands


def _to_install(command: str) -> str:
    folder = PACKAGES[command]
    if folder == "djinn_server":
        from djinn_core.registry.embedded_executors import INSTALL_SERVER

        return f"`djinn {command}` is in the package djinn-server, which is not installed. {INSTALL_SERVER}"
    return (
        f"`djinn {command}` is in a package of Djinn that is not in use: run {install_hint(folder)}. "
        "`djinn plugins` shows installed, disabled and broken plugins."
    )


def _broken_plugins(offered: PluginCommands) -> list[str]:
    """Return a sentence for each plugin whose commands failed to load."""
    errors = [str(failure.error).rstrip(".") + "." for failure in offered.failures]
    if offered.disabled:
        errors.append(f"The setting `disable` disables the commands of {', '.join(offered.disabled)}.")
    return errors


def _with_code(error: Exception) -> str:
    """Return the error's message and its code for `djinn explain-error`. A usage error of the command line has no code."""
    if not isinstance(error, DjinnError) or isinstance(error, ConfigurationError):
        return str(error)
    return f"{error}\n`djinn explain-error {error.code}` shows causes and cures."


def _plugin_failure(ctx: click.Context, owner: PluginRow, error: Exception) -> str:
    """Return the message for an unexpected exception of a plugin's command."""
    from djinn_core.registry.loading import shown

    package = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    if package.startswith("djinn_"):
        return (
            f"`djinn {ctx.invoked_subcommand}` needs the package {package.replace('_', '-')}, which is not installed: run "
            f"{install_hint(package.replace('djinn_', 'plugins/'))}."
        )
    return (
        f"`djinn {ctx.invoked_subcommand}`, a command of {owner.label}, raised {shown(error)}. "
        "DJINN_DEBUG=plugins shows the traceback, which helps its author."
    )


def _append_working_directory() -> None:
    """Append the working directory to `sys.path`, so that its modules can be named as plugins, as with `python -m`.

    It comes last, so that its modules cannot shadow others.
    """
    with contextlib.suppress(FileNotFoundError):  # the directory was removed
        directory = str(Path.cwd())
        if not {"", directory} & {*sys.path}:
            sys.path.append(directory)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="djinn", prog_name="djinn")
def main() -> None:
    """A remote accelerator as a local PyTorch device.

    Settings come from flags, then the environment (DJINN_<NAME>), then a TOML file. `djinn doctor --all` shows the
    source of each setting.
    """
    # Report an invalid setting before any work starts. `doctor` reports it itself.
    _prepare()


def _prepare() -> None:
    from djinn_core import logs
    from djinn_core.settings import resolve

    logs.show("warning")
    context = click.get_current_context()
    if _PLUGINS in context.meta:
        for failure in _plugin_commands(context).failures:
            failure.warn_of_hook()
    try:
        settings = resolve().settings
        logs.set_debug_level(settings.debug)
        if settings.plugins:
            _append_working_directory()
    except ConfigurationError:
        if context.invoked_subcommand != "doctor":
            raise
