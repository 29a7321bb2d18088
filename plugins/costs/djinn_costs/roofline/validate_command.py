"""Command `djinn validate`: compare predicted and measured times of programs that calibration does not use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from djinn_core.cli.server_options import server_options
from djinn_costs.roofline.calibrate_command import progress, server_settings

if TYPE_CHECKING:
    from djinn_costs.roofline.calibration.validate import Validation


@click.command("validate", short_help="Compare predicted with measured times.")
@server_options
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="Number of times that each program is timed."
)
@click.option(
    "--only", multiple=True, help="Try only programs whose names contain this text. May be given several times."
)
@click.option(
    "--processor-time",
    is_flag=True,
    help="Measure processor time, for busy machines. Needs a local executor with one thread.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="SVG file for a plot of predicted over measured times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one object.")
def validate(
    servers: tuple[str, ...],
    connection_file: Path | None,
    rounds: int,
    only: tuple[str, ...],
    processor_time: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Time models of several kinds and sizes, predict them, and compare.

    Calibration and measurement alternate, because machines drift. The result of `djinn calibrate` is neither used nor changed.
    Programs run without plugins that rewrite them. This takes a minute or two.
    """
    from djinn_costs.roofline.calibration.plot import check_drawable, draw
    from djinn_costs.roofline.calibration.session import open_session
    from djinn_costs.roofline.calibration.validate import validate_session

    if plot is not None and plot.suffix != ".svg":
        raise click.BadParameter(f"{plot} does not end in .svg: only SVG can be drawn", param_hint="--plot")
    if plot is not None:
        check_drawable()
    open_session(**server_settings(servers, connection_file))
    with progress(as_json) as report:
        validation = validate_session(rounds, processor_time=processor_time, only=only, report=report)
    if plot is not None:
        draw(validation, plot)
    _print_json(validation) if as_json else _print_table(validation)


def _print_json(validation: Validation) -> None:
    rows = [
        {
            "name": c.name,
            "predicted": c.predicted,
            "measured": c.measured,
            "error": c.error,
            "nodes": c.nodes,
            "flops": c.flops,
        }
        for c in validation.comparisons
    ]
    summary = {"median_error": validation.median_error, "p90_error": validation.p90_error, "r2_log": validation.r2_log}
    click.echo(json.dumps({**summary, "programs": rows}))


def _print_table(validation: Validation) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("program", box=None)
    for title in ("ops", "GFLOP", "predicted ms", "measured ms", "error"):
        table.add_column(title, justify="right")
    for c in sorted(validation.comparisons, key=lambda c: c.measured):
        times = (f"{c.predicted * 1e3:.2f}", f"{c.measured * 1e3:.2f}", f"{c.predicted / c.measured - 1:+.0%}")
        table.add_row(c.name, f"{c.nodes:,}", f"{c.flops / 1e9:.3f}", *times)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"median error {validation.median_error:.1%}, nine in ten below {validation.p90_error:.1%}, R² of log time {validation.r2_log:.4f}"
    )
