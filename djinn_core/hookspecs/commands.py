"""Commands of the command line `djinn`."""

from __future__ import annotations

from collections.abc import Iterable

from click import Command

from djinn_core.hookspecs import hookspec

__all__ = ["Command", "djinn_register_commands"]


@hookspec
def djinn_register_commands() -> Iterable[Command]:
    """Return the commands that this plugin adds to `djinn`, as click makes them. It takes no settings.

    Called once in each command process that lists commands or runs a plugin's command. Plugins with an entry point in
    the group `djinn.commands` are included. The module of such a plugin is imported for `djinn --help`: it imports
    click and pluggy alone, and each command imports what it needs when it runs. A plugin that offers a name which is
    taken is refused. An exception that a command raises and that is neither Djinn's nor click's is reported with the
    name of its plugin.
    """
    raise NotImplementedError
