"""Commands that plugins add to `djinn`, loaded and checked, without importing PyTorch.

A plugin with commands has an entry point in the group `djinn.commands` besides the one that makes it a plugin, so that no
other plugin is imported for `djinn --help`. The setting `plugins` leaves commands alone: it is about what programs use.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import attrs

from djinn_core.errors import PluginError
from djinn_core.registry.command_listing import COMMAND_GROUP
from djinn_core.registry.discovery import PluginCandidate, installed, named
from djinn_core.registry.entry_points import CORE_DISTRIBUTION
from djinn_core.registry.intake import PluginFailure, PluginLoader
from djinn_core.registry.kinds import COMMAND_KINDS
from djinn_core.registry.registry import Selection
from djinn_core.registry.report import PluginRow

if TYPE_CHECKING:
    from click import Command


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
    if entry_points is None:
        entry_points = importlib.metadata.entry_points(group=COMMAND_GROUP)
    core = PluginCandidate("djinn", CORE_DISTRIBUTION, "", lambda: None, builtin=True)
    loader = PluginLoader(selection.disable, COMMAND_KINDS, selection.trace, selection.plugin_settings)
    loader.claims.update({("command", name): core for name in taken})
    for candidate in (*installed(entry_points), *_modules(selection)):
        loader.take(candidate)
    commands = {command.name: command for command in loader.objects["commands"]}
    owners = {name: row for (_, name), row in loader.owners.items()}
    disabled = tuple(row.name for row in loader.rows if row.status == "disabled")
    return PluginCommands(commands, owners, tuple(loader.failures), disabled)


def _modules(selection: Selection) -> Iterable[PluginCandidate]:
    """Modules that the setting `plugins` names and no distribution offers."""
    requests = selection.plugins or ()
    offered = installed() if requests else ()
    known = {candidate.name for candidate in offered}
    for request in requests:
        if request not in known:
            try:
                yield named(request, ())
            except PluginError:  # programs that load plugins say so; a command may need none
                continue
