"""Command `djinn doctor`."""

from __future__ import annotations

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the full report as JSON.")
@click.option(
    "--all", "everything", is_flag=True, help="Also show versions, plugins, and each setting with its origin."
)
@click.option("--measure", is_flag=True, help="Measure how long a step must be for the remote device to save time.")
def doctor(as_json: bool, everything: bool, measure: bool) -> None:
    """Report problems of this installation with advice, and whether the servers accept this client.

    The exit status is 1 if Djinn cannot work because of a problem.
    """
    import json

    import attrs
    from rich.console import Console

    from djinn_commands.servers.diagnosis import diagnose, show
    from djinn_commands.servers.step_costs import describe
    from djinn_commands.servers.step_costs import measure as measure_steps

    diagnosis = diagnose()
    costs = measure_steps() if measure and diagnosis.well else None
    if as_json:
        step_cost_rows = {"step_costs": attrs.asdict(costs)} if costs else {}
        click.echo(json.dumps({**attrs.asdict(diagnosis), "well": diagnosis.well, **step_cost_rows}, indent=2))
    else:
        show(diagnosis, Console(), everything=everything)
        for line in describe(costs) if costs else ():
            click.echo(line)
    if not diagnosis.well:
        raise click.exceptions.Exit(1)
