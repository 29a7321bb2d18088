"""`djinn doctor`."""

from __future__ import annotations

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one object with everything that was found out.")
@click.option(
    "--all", "everything", is_flag=True, help="Show versions, plugins, and each setting with its origin as well."
)
def doctor(as_json: bool, everything: bool) -> None:
    """Say what is wrong with this installation and how to mend it, and whether the servers let us in.

    Exits with 1 if something keeps Djinn from working.
    """
    import json

    import attrs
    from rich.console import Console

    from djinn_commands.servers.diagnosis import diagnose, show

    diagnosis = diagnose()
    if as_json:
        click.echo(json.dumps({**attrs.asdict(diagnosis), "well": diagnosis.well}, indent=2))
    else:
        show(diagnosis, Console(), everything=everything)
    if not diagnosis.well:
        raise click.exceptions.Exit(1)
