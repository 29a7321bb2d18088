"""`djinn published`: the weights that clients of a tenant have published under names."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import attrs
import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from djinn_client.cli.server_options import server_options
from djinn_core.system.printable import size_text


@click.command(name="published")
@server_options
@click.option("--remove", "removed", multiple=True, metavar="NAME", help="Remove this name first. May be repeated.")
@click.option("--json", "as_json", is_flag=True, help="As JSON: a list, one object a name.")
def command(servers: tuple[str, ...], connection_file: Path | None, removed: tuple[str, ...], as_json: bool) -> None:
    """List the names under which weights are published, with their bytes and the time that is left to them.

    Without a server, those that programs with executors of their own have published on this machine.
    """
    djinn: Any = importlib.import_module("djinn")  # a program like any other, in a layer above
    if servers:
        djinn.configure(servers=servers)
    if connection_file is not None:
        djinn.configure(connection_file=connection_file)
    for name in removed:
        djinn.weights.unpublish(name)
    found = list(djinn.weights.published().values())
    if as_json:
        rows = [attrs.asdict(one) for one in found]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    if not found:
        click.echo("nothing is published")
        return
    table = Table("name", "size", "published", "expires", box=None, pad_edge=False)
    for one in found:
        times = f"{_span(one.age)} ago", f"in {_span(one.seconds_left)}"
        table.add_row(Text(one.name), size_text(one.nbytes), *times)
    Console(highlight=False).print(table)


def _span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
