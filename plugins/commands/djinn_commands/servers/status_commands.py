"""Commands that query servers: `djinn status`, `djinn kill` and `djinn published`."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import click

from djinn_core.cli.server_options import server_options

WATCH_SECONDS = 2.0


@click.command(name="status")
@server_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with one object per server.")
@click.option("--watch", is_flag=True, help="Repeat every two seconds, until Ctrl-C. `djinn top` also shows rates.")
def status(servers: tuple[str, ...], connection_file: Path | None, as_json: bool, watch: bool) -> None:
    """Show the sessions, executors, devices and memory of servers."""
    from rich.console import Console

    from djinn_client.runtime.connecting.servers import ask_named
    from djinn_commands.servers.status_text import show_all
    from djinn_core.wire.messages import Status

    console = Console(highlight=False)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            statuses = ask_named(servers, connection_file)
            if watch and console.is_terminal and not as_json:
                console.clear()
            show_all(console, statuses, as_json=as_json)
            if not watch:
                break
            time.sleep(WATCH_SECONDS)
    if not watch and not any(isinstance(reply, Status) for reply in statuses.values()):
        raise SystemExit(1)


@click.command(name="kill")
@click.argument("session")
@server_options
def kill(session: str, servers: tuple[str, ...], connection_file: Path | None) -> None:
    """End SESSION. SESSION is the name of a session in `djinn status`, or the beginning of a name.

    The executor stops the session before the next op and frees its tensors. The session's program gets SessionLost. An operator
    may end all sessions, a tenant its own sessions.
    """
    from djinn_client.runtime.connecting.killing import kill_session
    from djinn_client.runtime.connecting.servers import command_settings
    from djinn_core.errors import ConfigurationError
    from djinn_core.wire.messages import Killed

    replies = kill_session(command_settings(servers, connection_file), session)
    if not replies:
        raise ConfigurationError(
            "no server is configured: name a log-in or a URL (with DJINN_TOKEN) with --server, or the file that `djinn serve` wrote with "
            "--connection-file. To stop the ops of your own program, use Ctrl-C or djinn.cancel()"
        )
    killed = [reply for reply in replies.values() if isinstance(reply, Killed)]
    for one in killed:
        click.echo(f"ended session {one.session} of {one.client}")
    if not killed:
        raise click.ClickException("; ".join(dict.fromkeys(str(reply) for reply in replies.values())))


@click.command(name="published")
@server_options
@click.option(
    "--remove",
    "removed",
    multiple=True,
    metavar="NAME",
    help="Before listing, remove the weights with this name. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with one object per name.")
def published(servers: tuple[str, ...], connection_file: Path | None, removed: tuple[str, ...], as_json: bool) -> None:
    """List published weights, with their bytes and the time until they expire.

    If no server is named or configured, list the weights that programs published for local executors of this machine.
    """
    import attrs
    import msgspec
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    import djinn
    from djinn_core.system.printable import size_text

    if servers:
        djinn.configure(servers=servers)
    if connection_file is not None:
        djinn.configure(connection_file=connection_file)
    for name in removed:
        djinn.weights.unpublish(name)
    weights = list(djinn.weights.published().values())
    if as_json:
        rows = [attrs.asdict(one) for one in weights]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    if not weights:
        click.echo("no weights are published")
        return
    table = Table("name", "size", "published", "expires", box=None, pad_edge=False)
    for one in weights:
        times = f"{_span(one.age)} ago", f"in {_span(one.seconds_left)}"
        table.add_row(Text(one.name), size_text(one.nbytes), *times)
    Console(highlight=False).print(table)


def _span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
