"""`djinn doctor`: versions, plugins, configuration and its origins, servers, and what to mend."""

from __future__ import annotations

import json
from collections.abc import Sequence

import attrs
import click
from rich.console import Console
from rich.table import Table

from djinn_core.cli.diagnosis import Diagnosis, diagnose


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one object with everything that was found out.")
def command(as_json: bool) -> None:
    """Say what is wrong with this installation and how to mend it.

    Shows versions, plugins, every setting with where its value came from, and whether the servers let us in. Exits with
    1 where something keeps Djinn from working.
    """
    diagnosis = diagnose()
    if as_json:
        click.echo(json.dumps({**attrs.asdict(diagnosis), "well": diagnosis.well}, indent=2))
    else:
        _show(diagnosis, Console())
    if not diagnosis.well:
        raise click.exceptions.Exit(1)


def _show(diagnosis: Diagnosis, console: Console) -> None:
    console.print(_pairs("Versions", ("what", "version"), list(diagnosis.versions.items())))
    plugins = [(row.name, row.kind, f"{row.distribution} {row.version}", row.status) for row in diagnosis.plugins]
    console.print(_pairs("Plugins", ("name", "kind", "from", "status"), plugins))
    settings = [(row.name, row.value, row.origin) for row in diagnosis.settings]
    console.print(_pairs("Settings", ("name", "value", "where it came from"), settings))
    console.print(f"Configuration file: {diagnosis.configuration_file or 'none'}", highlight=False, markup=False)
    for server in diagnosis.servers:
        word = "answers" if server.reachable else "does not let us in"
        console.print(f"Server {server.url} {word}: {server.detail}", highlight=False, markup=False)
    if not diagnosis.servers:
        console.print("Servers: none configured; an executor on this machine starts at first use.")
    _show_findings(diagnosis, console)


def _show_findings(diagnosis: Diagnosis, console: Console) -> None:
    if not diagnosis.findings:
        console.print("[green]All is well.[/green]")
    for finding in diagnosis.findings:
        console.print("[red]wrong[/red]  " if finding.fatal else "[yellow]note[/yellow]   ", end="")
        console.print(f"{finding.what}\n       {finding.mend}", highlight=False, markup=False)


def _pairs(title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(*headings, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    return table
