"""`djinn plugins`: what is built in, installed or broken; `djinn plugins new`: a skeleton for one of your own."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from djinn_core.builtins import builtin_plugins
from djinn_core.cli.new_plugin import render
from djinn_core.config import resolve
from djinn_core.plugins.kinds import KINDS
from djinn_core.plugins.registry import Selection, survey
from djinn_core.plugins.report import PluginRow

_STYLES = {"active": "green", "failed": "red", "disabled": "yellow", "unselected": "dim"}


@click.group("plugins", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print a list with one object a plugin.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the plugins: built-in, installed and unusable ones.

    DJINN_PLUGINS=a,b uses the built-in plugins and exactly these (empty: no others), DJINN_DISABLE=x leaves some out,
    DJINN_STRICT=1 makes a broken one an error, DJINN_TRACE_PLUGINS=1 logs each call of a hook.
    """
    if ctx.invoked_subcommand is not None:
        return
    found = survey(Selection.from_settings(resolve().settings), builtins=builtin_plugins())
    rows = found.registry.rows
    if as_json:
        click.echo(json.dumps([attrs.asdict(row) | {"processes": row.processes} for row in rows], indent=2))
        return
    console = Console()
    console.print(_table(rows))
    for row in rows:
        if row.error:
            console.print(Text.assemble((f"{row.name}: ", "red"), row.error), highlight=False, soft_wrap=True)


def _table(rows: tuple[PluginRow, ...]) -> Table:
    columns = ("name", "kind", "called in", "distribution", "version", "status")
    table = Table(*columns, box=SIMPLE_HEAD, show_edge=False)
    for row in rows:
        status = f"[{_STYLES[row.status]}]{row.status}[/]"
        table.add_row(row.name, row.kind, ", ".join(row.processes), row.distribution, row.version, status)
    return table


@command.command("new")
@click.argument("name")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), default=Path())
@click.option(
    "--kind",
    type=click.Choice([kind.name for kind in KINDS]),
    default="patterns",
    show_default=True,
    help="What it adds.",
)
def new(name: str, directory: Path, kind: str) -> None:
    """Write the skeleton of a plugin NAME, a package that can be installed and passes its tests, into DIRECTORY.

    DIRECTORY is the present one unless given; the plugin gets a folder of its own in it.
    """
    folder = render(name, kind, directory)
    click.echo(f"{folder} holds a plugin of kind {kind}. Install it with `pip install -e {folder}`, see it with")
    click.echo(f"`djinn plugins`, test it with `pytest {folder}`.")
