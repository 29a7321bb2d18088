"""Training runs of 200 steps, local and on a server process: `python -m evaluation curves`.

Exits with 1 if a curve differs from the local one.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import attrs
from rich.console import Console
from rich.table import Table

from evaluation.zoo.curves import OPTIMIZERS, Comparison, compare_runs, digits, prose
from evaluation.zoo.reporting import made_by, markdown
from evaluation.zoo.serving import serving

STEPS = 200
COLUMNS = ("task", "optimizer", "loss at first", "at last", "largest difference", "of parameters", "first apart", "here (s)",
           "remote (s)")  # fmt: skip


def runs(steps: int) -> Iterator[Comparison]:
    """Yield the comparisons of all tasks and optimizers after `steps` steps."""
    for task in (digits(), prose("eager"), prose("sdpa")):
        for optimizer in OPTIMIZERS:
            yield compare_runs(task, optimizer, steps)
    for task in (digits(), prose("eager")):
        yield compare_runs(task, "adamw, foreach", steps, bf16=True)


def main() -> int:
    """Train, print a table and, if requested, write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--markdown", type=Path, help="also write the table to this page")
    options = parser.parse_args()
    console = Console(width=170)
    results = []
    with warnings.catch_warnings(), serving():
        warnings.simplefilter("ignore")
        for item in runs(options.steps):
            results.append(item)
            console.print(f"{item.task}, {item.optimizer}: {'equal' if item.equal else 'DIFFERS'}", highlight=False)
    shown = Table(*COLUMNS, title=f"{options.steps} steps")
    for item in results:
        shown.add_row(*cells(item))
    console.print(shown)
    if options.json:
        options.json.write_text(json.dumps([attrs.asdict(item) for item in results], indent=1) + "\n")
    if options.markdown:
        table = markdown(COLUMNS, map(cells, results))
        options.markdown.write_text("\n".join([INTRODUCTION, made_by("python -m evaluation curves"), "", table, ""]))
    return int(not all(item.equal for item in results))


def cells(one: Comparison) -> tuple[str, ...]:
    """Return one row of the table."""
    losses = (f"{one.first_loss:.4f}", f"{one.last_loss:.4f}")
    apart = "" if one.apart is None else str(one.apart)
    differences = ("bitwise", "bitwise", "") if one.bitwise else (f"{one.largest:.1e}", f"{one.last:.1e}", apart)
    return (one.task, one.optimizer, *losses, *differences, f"{one.here:.1f}", f"{one.remote:.1f}")


INTRODUCTION = f"""# Training runs

This page compares training runs of {STEPS} steps, locally and on a server process: a CNN with batch norm and dropout on scikit-learn's
handwritten digits, and a small GPT on Python's own documentation. Every loss is compared, and every parameter and buffer at the end.
"bitwise" means that no loss differs. "first apart" is the first step whose losses differ.
[Decision 15](../../docs/decisions/0015-compare-results-bitwise.md) defines the tolerances.
"""

if __name__ == "__main__":
    sys.exit(main())
