"""Commands that plugins add to `djinn`. They are loaded and checked without importing PyTorch.

The setting `plugins` does not select commands, because it selects the plugins of programs.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import attrs

from djinn_core.errors import PluginError
from djinn_core.registry.discovery import PluginCandidate, installed, named
from djinn_core.registry.loading import PluginFailure, PluginLoader
from djinn_core.registry.report import PluginRow
from djinn_core.registry.selection import Selection

if TYPE_CHECKING:
    from click import Command

_KIND = "commands"


@attrs.frozen
class PluginCommands:
    """The commands that plugins add to `djinn`.

    Attributes:
        commands: click commands by name.
        owners: plugins by command name.
        failures: plugins with unusable commands, with reasons.
        disabled: names of plugins that the setting `disable` excludes.
    """

    commands: Mapping[str, Command] = attrs.field(factory=dict)
    owners: Mapping[str, PluginRow] = attrs.field(factory=dict)
    failures: tuple[PluginFailure, ...] = ()
    disabled: tuple[str, ...] = ()


def find_commands(
    selection: Selection,
    reserved_names: Collection[str],
    entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
) -> PluginCommands:
    """Return the commands of installed plugins that are not disabled, and of modules in the setting `plugins`.

    Args:
        selection: only `plugins`, `disable` and the plugins' own settings have an effect.
        reserved_names: names of the core's commands, which plugins cannot use.
        entry_points: entry points to use instead of the entry points of all installed distributions.
    """
    core = PluginCandidate("djinn", builtin=True)
    loader = PluginLoader(selection, {_KIND}, reserved_names={(_KIND, name): core for name in reserved_names})
    candidates = installed(entry_points)
    for candidate in candidates:
        if _KIND in candidate.points:
            loader.take(candidate)
    names = {candidate.name for candidate in candidates}
    for request in selection.plugins or ():
        if request not in names:
            try:
                loader.take(named(request, ()))
            except PluginError:  # the programs themselves warn of failed plugins; a command may need none
                continue
    commands = {command.name: command for command in loader.load(_KIND)}
    owners = {name: plugin.row for (_, name), plugin in loader.owners.items()}
    disabled = tuple(plugin.candidate.name for plugin in loader.plugins if plugin.status == "disabled")
    return PluginCommands(commands, owners, tuple(loader.failures), disabled)
