"""Options of commands that query servers. Plugins import this module to list their commands, so it imports little."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select servers. `command` receives them as `servers` and `connection_file`."""
    connection_file = click.option(
        "--connection-file", type=click.Path(path_type=Path), help="File that `djinn serve` wrote."
    )
    server = click.option(
        "--server",
        "servers",
        multiple=True,
        help="Name (`djinn login`) or URL of a server. Default: the configured servers.",
    )
    return server(connection_file(command))
