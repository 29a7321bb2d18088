"""PyTorch's operator, module and optimizer databases, local and remote: `python -m evaluation conformance`.

Prints a table, with `--json FILE` also to a file. Exits with 1 on a difference that is not listed as left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import djinn
from evaluation.conformance.module_database import check_module, check_optimizer, modules, optimizers
from evaluation.conformance.op_database import WAYS, check, entries
from evaluation.conformance.samples import INDEX, LOCAL
from evaluation.conformance.verdicts import LEFT_OUT, Verdict

# samples of each entry (and dtype); None: all
SAMPLES: dict[str, int | None] = {
    "op_db forward": None,
    "op_db gradient": None,
    "op_db in-place": None,
    "op_db out=": 3,
    "op_db errors": None,
    "op_db dtypes": 3,
    "op_db conj and neg": 4,
    "module_db": None,
    "optim_db": None,
}
CHUNK = 9  # entries per process
TITLE = "the same here and on remote_accelerator: results, layouts, dtypes, and exceptions by their type"


@attrs.frozen
class Work:
    """Positions of entries of one database."""

    database: str
    positions: tuple[int, ...]


def _judge(work: Work) -> tuple[str, list[Verdict]]:
    samples = _few(SAMPLES[work.database])
    verdicts: list[Verdict] = []
    for position in work.positions:
        if work.database in WAYS:
            verdict = check(list(entries())[position], work.database, samples=samples)
        elif work.database == "module_db":
            verdict = check_module(list(modules())[position], samples=samples)
        else:
            verdict = check_optimizer(list(optimizers())[position], samples=samples)
        verdicts.append(attrs.evolve(verdict, error=None))  # some exceptions cannot be pickled
    return work.database, verdicts


def _few(samples: int | None) -> int | None:
    most = _chosen[0].samples
    return samples if most is None else min(most, samples or most)


@attrs.frozen
class Choice:
    """Configuration: number of executors, placement policy, and maximum samples per entry."""

    executors: int = 1
    policy: str = ""
    samples: int | None = None


_chosen = [Choice()]


def _start(choice: Choice) -> None:
    torch.set_num_threads(1)
    _chosen[:] = [choice]
    djinn.configure(threads=1, executors=choice.executors, placement_policy=choice.policy)


def _work(only: str) -> list[Work]:
    sizes = {name: len(list(entries())) for name in WAYS}
    sizes |= {"module_db": len(list(modules())), "optim_db": len(list(optimizers()))}
    return [
        Work(name, tuple(range(first, min(first + CHUNK, size))))
        for name, size in sizes.items()
        if only in name
        for first in range(0, size, CHUNK)
    ]


def run(only: str, processes: int, choice: Choice, console: Console) -> dict[str, list[Verdict]]:
    """Return the verdicts of each database whose name contains `only`, without inapplicable entries."""
    verdicts: dict[str, list[Verdict]] = {}
    work = _work(only)
    with (
        multiprocessing.get_context("spawn").Pool(processes, _start, (choice,)) as pool,
        Progress(console=console) as progress,
    ):
        task = progress.add_task("entries", total=sum(len(w.positions) for w in work))
        for name, verdict_list in pool.imap(_judge, work):
            verdicts.setdefault(name, []).extend(v for v in verdict_list if v.outcome != "none")
            progress.update(task, advance=len(verdict_list), description=name)
        pool.close()
        pool.join()
    return verdicts


def rows_of(verdicts: dict[str, list[Verdict]]) -> list[dict[str, Any]]:
    """Return one row per database for the table."""
    rows = []
    for name, verdict_list in verdicts.items():
        counts = Counter(v.outcome for v in verdict_list)
        rows.append({
            "database": name,
            "entries": len(verdict_list),
            "samples": sum(v.samples for v in verdict_list),
            "passed": counts["passed"],
            "failed": counts["failed"],
            "left out": counts["left out"],
        })  # fmt: skip
    return rows


def report(verdicts: dict[str, list[Verdict]], console: Console) -> dict[str, Any]:
    """Print the verdicts. Return them as JSON values."""
    rows = rows_of(verdicts)
    table = Table(*rows[0], title=TITLE)
    for row in rows:
        table.add_row(*map(str, row.values()))
    for name, verdict_list in verdicts.items():
        for v in verdict_list:
            if v.outcome == "failed":
                console.print(f"{name}, {v.name}: {v.wrong} of {v.samples} samples. {v.reason}", markup=False)
    console.print(table)
    everything = [v for verdict_list in verdicts.values() for v in verdict_list]
    left_out = {v.name: v.reason for v in everything if v.outcome == "left out"}
    excluded = Table(
        "left out", "why", title=f"left out: {len(left_out)} of {len({v.name for v in everything})} entries"
    )
    for name, reason in left_out.items():
        excluded.add_row(name, reason)
    console.print(excluded)
    nothing = sorted({v.name for v in verdicts.get("op_db forward", ()) if v.samples == v.refused and v.samples})
    console.print("refused by this CPU, too, with the same exception: " + ", ".join(nothing), markup=False)
    failures = [
        attrs.asdict(v) | {"database": name} for name, j in verdicts.items() for v in j if v.outcome == "failed"
    ]
    return {"torch": torch.__version__, "rows": rows, "left out": left_out, "refused": nothing, "failed": failures}


def main() -> int:
    """Run all databases and print the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument("--only", default="", help="databases whose name contains this")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--executors", type=int, default=1, help="number of executors that form the device")
    parser.add_argument("--policy", default="", help="placement policy, such as round_robin")
    parser.add_argument("--index", type=int, default=0, help="index of the device, such as 2 for the second executor")
    parser.add_argument("--samples", type=int, help="maximum number of samples per entry")
    parser.add_argument("--local", default="cpu", help="device here that results are compared with, such as cuda:0")
    options = parser.parse_args()
    console = Console()
    start = time.monotonic()
    os.environ |= {INDEX: str(options.index), LOCAL: options.local}  # for child processes
    choice = Choice(options.executors, options.policy, options.samples)
    verdicts = run(options.only, options.processes, choice, console)
    result = report(verdicts, console)
    console.print(f"{time.monotonic() - start:.0f} seconds")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2, default=str) + "\n")
    stale = [n for n in LEFT_OUT if not options.only and n not in result["left out"]]
    if stale:
        console.print(f"entries that pass now, and must be removed from LEFT_OUT: {stale}")
    return int(bool(result["failed"] or stale))


if __name__ == "__main__":
    sys.exit(main())
