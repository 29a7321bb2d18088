"""`djinn doctor`: versions, plugins, configuration and its origins, servers, and what to mend."""

from __future__ import annotations

import json
from collections.abc import Sequence

import attrs
import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from djinn_core.cli.diagnosis import Diagnosis, diagnose

_NOTHING = {"None": "", "()": ""}  # values of settings that say nothing


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one object with everything that was found out.")
def command(as_json: bool) -> None:
    """Say what is wrong with this installation and how to mend it.

    Shows versions, plugins, every setting with where its value came from, and whether the servers let us in. Exits with
    1 if something keeps Djinn from working.
    """
    diagnosis = diagnose()
    if as_json:
        click.echo(json.dumps({**attrs.asdict(diagnosis), "well": diagnosis.well}, indent=2))
    else:
        _show(diagnosis, Console())
    if not diagnosis.well:
        raise click.exceptions.Exit(1)


def _show(diagnosis: Diagnosis, console: Console) -> None:
    versions = list(diagnosis.versions.items())
    plugins = [
        (row.name, row.kind, ", ".join(row.processes), f"{row.distribution} {row.version}", row.status)
        for row in diagnosis.plugins
    ]
    settings = [(row.name, _NOTHING.get(row.value, row.value), row.origin) for row in diagnosis.settings]
    console.print(_pairs("Versions", ("what", "version"), versions), "")
    console.print(_pairs("Plugins", ("name", "kind", "called in", "from", "status"), plugins), "")
    console.print(_pairs("Settings", ("name", "value", "where it came from"), settings), "")
    _say(console, f"Configuration file: {diagnosis.configuration_file or 'none'}")
    for name, facts in diagnosis.transports.items():
        _say(console, f"Transport {name}: {facts}")
    for server in diagnosis.servers:
        _say(console, f"Server {server.url}: {server.detail if server.reachable else 'of no use, see below'}")
    if not diagnosis.servers and diagnosis.well:
        _say(console, "Servers: none; an executor on this machine starts at first use.")
    console.print()
    _show_findings(diagnosis, console)


def _show_findings(diagnosis: Diagnosis, console: Console) -> None:
    for finding in diagnosis.findings:
        console.print("[red]wrong[/red]  " if finding.fatal else "[yellow]note[/yellow]   ", end="")
        _say(console, f"{finding.what}\n       {finding.mend}")
    if diagnosis.well:
        console.print("[green]All is well.[/green]" if not diagnosis.findings else "[green]Djinn works.[/green]")


def _say(console: Console, text: str) -> None:
    """Text as it is, broken by the terminal if at all, so that addresses can be copied and searched for."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _pairs(title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
