"""Commands that plugins add to `djinn`, loaded and checked, without importing PyTorch.

The setting `plugins` leaves commands alone: it is about what programs use.
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
    """Commands of plugins.

    Attributes:
        commands: by name what click runs.
        owners: by name of a command the plugin that it is of.
        failures: plugins whose commands cannot be used, and why.
        disabled: names of plugins that the setting `disable` leaves out.
    """

    commands: Mapping[str, Command] = attrs.field(factory=dict)
    owners: Mapping[str, PluginRow] = attrs.field(factory=dict)
    failures: tuple[PluginFailure, ...] = ()
    disabled: tuple[str, ...] = ()


def find_commands(
    selection: Selection, taken: Collection[str], entry_points: Iterable[importlib.metadata.EntryPoint] | None = None
) -> PluginCommands:
    """Commands of the installed plugins that are not disabled, and of modules that the setting `plugins` names.

    Args:
        selection: `plugins`, `disable` and the plugins' own settings count.
        taken: names of the core's commands; a plugin that offers one of these is refused.
        entry_points: what to discover instead of the entry points of all installed distributions.
    """
    core = PluginCandidate("djinn", builtin=True)
    loader = PluginLoader(selection, {_KIND}, taken={(_KIND, name): core for name in taken})
    offered = installed(entry_points)
    for candidate in offered:
        if _KIND in candidate.points:
            loader.take(candidate)
    known = {candidate.name for candidate in offered}
    for request in selection.plugins or ():
        if request not in known:
            try:
                loader.take(named(request, ()))
            except PluginError:  # programs that load plugins say so; a command may need none
                continue
    commands = {command.name: command for command in loader.load(_KIND)}
    owners = {name: plugin.row for (_, name), plugin in loader.owners.items()}
    disabled = tuple(plugin.candidate.name for plugin in loader.plugins if plugin.status == "disabled")
    return PluginCommands(commands, owners, tuple(loader.failures), disabled)
