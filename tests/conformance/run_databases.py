"""Every sample of PyTorch's operator, module and optimizer databases, here and remotely: `make conformance`.

Ends with 1 where something is wrong that is not on the table of what is left out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from module_database import check_module, check_optimizer, modules, optimizers
from op_database import LEFT_OUT, Verdict, check, entries
from rich.console import Console
from rich.progress import track
from rich.table import Table

import djinn

DATABASES: dict[str, tuple[Callable[[], Iterable[Any]], Callable[..., Verdict]]] = {
    "op_db": (entries, check),
    "module_db": (modules, check_module),
    "optim_db": (optimizers, check_optimizer),
}


def main() -> int:
    """Run all databases and print what became of them."""
    torch.set_num_threads(1)
    djinn.configure(threads=1)
    table = Table(
        "database", "entries", "samples", "passed", "failed", "left out", title="float32, forward and gradient"
    )
    wrong = 0
    console = Console()
    for name, (find, judge) in DATABASES.items():
        verdicts = [judge(entry, samples=None) for entry in track(list(find()), name, console=console)]
        counts = Counter(verdict.outcome for verdict in verdicts)
        known = [verdict for verdict in verdicts if verdict.outcome == "failed" and verdict.name in LEFT_OUT]
        failed, left_out = counts["failed"] - len(known), counts["left out"] + len(known)
        samples = sum(verdict.samples for verdict in verdicts)
        table.add_row(name, *map(str, (len(verdicts), samples, counts["passed"], failed, left_out)))
        for verdict in verdicts:
            if verdict.outcome != "passed":
                console.print(f"{verdict.name}: {LEFT_OUT.get(verdict.name, verdict.reason)}", markup=False)
        wrong += failed
    console.print(table)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
