"""`djinn explain`: run a script and show what each stage decided about its programs, and why."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from djinn_core.cli.script import Script

if TYPE_CHECKING:
    from djinn_core.ir.result import PipelineResult

_STAGES = ("annotate", "estimate", "optimize", "place", "schedule")


@click.command("explain", context_settings={"ignore_unknown_options": True})
@click.option("--until", type=click.Choice(_STAGES), default=_STAGES[-1], help="The last stage to show.")
@click.option("--json", "as_json", is_flag=True, help="Print a list with one object a program.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(script: Path, arguments: tuple[str, ...], until: str, as_json: bool) -> None:
    """Run SCRIPT with ARGUMENTS and show what each stage decided about its programs, and why.

    What follows -- is for the script, whatever it looks like.

    Programs of the same structure are planned, and shown, once. What the script prints goes to standard error.
    """
    from djinn_core.ir.result import shown_until
    from djinn_core.runtime.client import record_plans

    with record_plans() as plans, contextlib.redirect_stdout(sys.stderr):
        status = _run(Script(str(script), arguments))
    results = [shown_until(result, until) for result in plans]
    _print_json(results) if as_json else _print_text(results, script)
    raise SystemExit(status)


def _run(script: Script) -> int:
    """Run the script to its end, however it ends; its exit status."""
    try:
        script.run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        click.echo(end.code, err=True)
        return 1
    return 0


def _print_json(results: Sequence[PipelineResult]) -> None:
    from djinn_core.showing.described import describe

    click.echo(json.dumps([describe(result) for result in results], indent=2))


def _print_text(results: Sequence[PipelineResult], script: Path) -> None:
    from djinn_core.showing.text import explain

    if not results:
        click.echo(f"{script} ran nothing on remote_accelerator: move a model or a tensor there with .to(...)")
    for number, result in enumerate(results, 1):
        click.secho(f"program {number} of {len(results)}", bold=True)
        click.echo(explain(result))
        click.echo()
