"""`djinn kill`: ends a session on a server, for the one whose it is, or for the operator."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

from djinn_client.cli.server_options import server_options
from djinn_core.errors import ConfigurationError


@click.command(name="kill")
@click.argument("session")
@server_options
def command(session: str, servers: tuple[str, ...], connection_file: Path | None) -> None:
    """End SESSION, named by the beginning of its name as `djinn status` shows it.

    What it computes is stopped before the next op, its tensors are freed, and its program gets SessionLost. The operator may end every
    session, a tenant its own.
    """
    from djinn_client.runtime.connecting.status import PATIENCE, kill_session
    from djinn_core.settings import resolve
    from djinn_core.wire.messages import Killed

    given = {"servers": servers or None, "connection_file": connection_file}
    settings = resolve({name: value for name, value in given.items() if value is not None}).settings
    replies = kill_session(attrs.evolve(settings, connect_timeout=min(settings.connect_timeout, PATIENCE)), session)
    if not replies:
        raise ConfigurationError(
            "no server is configured: name one with --server (a log-in of `djinn login`, or a URL and DJINN_TOKEN), or the file that `djinn serve` wrote "
            "with --connection-file or DJINN_CONNECTION_FILE. Ctrl-C or djinn.cancel() stop what a program of your own runs"
        )
    killed = [reply for reply in replies.values() if isinstance(reply, Killed)]
    for one in killed:
        click.echo(f"ended session {one.session} of {one.client}")
    if not killed:
        raise click.ClickException("; ".join(dict.fromkeys(str(reply) for reply in replies.values())))
