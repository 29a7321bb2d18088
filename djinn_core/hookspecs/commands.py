"""Commands of the command line `djinn`."""

from __future__ import annotations

from collections.abc import Iterable

from click import Command

from djinn_core.hookspecs import hookspec

__all__ = ["Command", "djinn_register_commands"]


@hookspec
def djinn_register_commands() -> Iterable[Command]:
    """Return the click commands that this plugin adds to `djinn`. The hook takes no settings.

    Called once in each command process that lists commands or runs a plugin's command. Plugins with an entry point in
    the group `djinn.commands` are included. `djinn --help` imports the module of such a plugin. So the module imports
    only click and pluggy, and each command imports other modules when it runs. A plugin that offers an existing command
    name is refused. An exception that is neither Djinn's nor click's is reported with the name of its plugin.
    """
    raise NotImplementedError
