"""`djinn servers`: the log-ins on this machine, without their tokens."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from djinn_client.runtime.connecting.logins import list_logins


@click.command(name="servers")
@click.option("--json", "as_json", is_flag=True, help="As JSON: a list, one object a log-in.")
def command(as_json: bool) -> None:
    """List the servers that you have logged in to."""
    logins = list_logins()
    if as_json:
        rows = [{"name": one.name, "urls": one.content.urls, "fingerprint": one.content.fingerprint} for one in logins]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
    elif not logins:
        click.echo("no log-ins: `djinn login ADDRESS` makes one")
    else:
        table = Table("name", "addresses", "certificate", box=None, pad_edge=False)
        for one in logins:
            shown = one.content.fingerprint[:23] + "..." if one.content.fingerprint else ""
            table.add_row(one.name, Text(", ".join(one.content.urls)), shown)
        Console().print(table)
