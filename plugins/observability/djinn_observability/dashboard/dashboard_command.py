"""`djinn dashboard`: a local web page that shows servers."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from djinn_core.cli.server_options import server_options


@click.command()
@server_options
@click.option("--port", default=0, show_default="a free one", help="Port on loopback.")
def dashboard(servers: tuple[str, ...], connection_file: Path | None, port: int) -> None:
    """Show what servers are doing, in a browser.

    The page is served on loopback until Ctrl-C. It asks for a code, which this command prints, so that other users of this
    machine cannot see it. A server with --operations-port has the same page at /dashboard, for a token.
    """
    from djinn.hooks import OperationsAddress, WatchedServer
    from djinn_client.runtime.connecting.killing import kill_session
    from djinn_client.runtime.connecting.servers import command_settings, read_status
    from djinn_core.wire.messages import Killed
    from djinn_observability.dashboard.operations import DjinnOperations, identify_by
    from djinn_observability.dashboard.view import merge

    def status(_: str | None) -> Mapping[str, Any]:
        return merge(read_status(servers, connection_file))

    def end(session: str, _: object) -> str:
        replies = kill_session(command_settings(servers, connection_file), session).values()
        return (
            "" if any(isinstance(reply, Killed) for reply in replies) else "; ".join(dict.fromkeys(map(str, replies)))
        )

    status(None)  # report configuration errors now
    code = secrets.token_urlsafe(9)
    operations = DjinnOperations()
    watched = WatchedServer(status, end, identify_by(code))
    url = operations.start(watched, OperationsAddress("127.0.0.1", port))
    click.echo(f"The dashboard is at {url}/dashboard\nThe code for it is {code}\nCtrl-C ends it")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        click.echo()
    finally:
        operations.close()
