"""Command `python -m evaluation interrupts`: Ctrl-C at random moments.

Reports per kind of work the delay of the exception and of the idle executor.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import defaultdict
from pathlib import Path

import click

import djinn
from djinn_core.system.interrupts import raise_outside_torch
from evaluation.chaos.interrupting import Trial, trials


@click.command()
@click.option("--presses", default=200, help="How many moments.")
@click.option("--seed", default=1)
@click.option("--server", default="", help="URL of a server. Without it, the program starts its own executor.")
@click.option("--raised-seconds", default=0.5, help="Maximum seconds from a press of Ctrl-C until its exception.")
@click.option("--idle-seconds", default=1.0, help="Maximum seconds from an exception until the executor is idle.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="File for the results.")
def main(presses: int, seed: int, server: str, raised_seconds: float, idle_seconds: float, file: Path | None) -> None:
    """Press Ctrl-C repeatedly. Exit with 1 if an exception came late, the executor stayed busy, or state was lost."""
    signal.signal(signal.SIGINT, raise_outside_torch)
    djinn.configure(threads=1, **({"servers": [server]} if server else {}))
    results: dict[str, list[Trial]] = defaultdict(list)
    bad = 0
    for number, trial in enumerate(trials(presses, seed)):
        results[trial.work].append(trial)
        late = max(trial.raised) > raised_seconds or trial.idle > idle_seconds
        bad += bool(late or trial.wrong)
        if late or trial.wrong:
            raised = ", ".join(f"{seconds:.2f}" for seconds in trial.raised)
            click.echo(
                f"{number} {trial.work} at {trial.moment:.2f} s: raised {raised}, idle {trial.idle:.2f} {trial.wrong}"
            )
    rows = {work: _row(of_it) for work, of_it in results.items()}
    for work, row in rows.items():
        click.echo(f"{work:12}" + "  ".join(f"{name} {value}" for name, value in row.items()))
    click.echo(f"{presses} moments, {bad} with faults")
    if file is not None:
        file.write_text(json.dumps({"presses": presses, "bad": bad, "work": rows}, indent=1) + "\n")
    sys.exit(bool(bad))


def _row(of_it: list[Trial]) -> dict[str, object]:
    raised = sorted(seconds for trial in of_it for seconds in trial.raised)
    idle = sorted(trial.idle for trial in of_it)
    return {
        "moments": len(of_it),
        "raised": len(raised),
        "median": round(raised[len(raised) // 2], 3),
        "latest": round(raised[-1], 3),
        "idle_median": round(idle[len(idle) // 2], 3),
        "idle_latest": round(idle[-1], 3),
        "wrong": sum(bool(trial.wrong) for trial in of_it),
    }


if __name__ == "__main__":
    main()
