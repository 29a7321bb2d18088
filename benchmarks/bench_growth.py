"""Growth of the cost of lists and chains of views with their length: processor time of client and executor, and exponents.

    python benchmarks/bench_growth.py [--sizes 1000 2000 4000 8000]

An exponent is the slope from the smallest to the largest size, in logarithms: 1 is linear. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import djinn
from djinn_core.errors import DjinnError

REMOTE = "remote_accelerator:0"


def executor_seconds() -> float:
    """Processor time of this process's children."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[1]) == os.getpid():
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def made(tensors: list[torch.Tensor]) -> None:
    """A list of new tensors."""
    torch._foreach_add(tensors, 1.0)[-1].cpu()  # noqa: SLF001 - what optimizers call


def written(tensors: list[torch.Tensor]) -> None:
    """A list that is written in place."""
    torch._foreach_mul_(tensors, 1.5)
    tensors[-1].cpu()


def fused(tensors: list[torch.Tensor]) -> None:
    """A step of an optimizer over lists."""
    step = torch.ones((), device=REMOTE)
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}
    lists = [[torch.zeros_like(t) for t in tensors] for _ in range(3)]
    torch._fused_adam_(tensors, *lists, [], [step.clone() for _ in tensors], **numbers, maximize=False)
    tensors[-1].cpu()


def viewed(tensors: list[torch.Tensor]) -> None:
    """A chain of views that is as long as the list."""
    view = tensors[0]
    for _ in tensors:
        view = view.view(-1)
    view.cpu()


def reshaped(tensors: list[torch.Tensor]) -> None:
    """A chain of views that differ."""
    view = tensors[0]
    for number in range(len(tensors)):
        view = view.view(2, 2) if number % 2 else view.view(4)
    view.cpu()


def differentiated(tensors: list[torch.Tensor]) -> None:
    """A chain of views through which gradients go."""
    view = base = tensors[0].clone().requires_grad_()
    for number in range(len(tensors)):
        view = view.view(2, 2) if number % 2 else view.view(4)
    view.sum().backward()
    assert base.grad is not None
    base.grad.cpu()


def failing(tensors: list[torch.Tensor]) -> None:
    """As many ops in place that fail on the executor."""
    beyond = torch.tensor([99], device=REMOTE)
    for tensor in tensors:
        tensor.clone().index_fill_(0, beyond, 1.0)
    try:
        djinn.synchronize()
    except DjinnError:
        return
    raise AssertionError("nothing failed")


KINDS: tuple[Callable[[list[torch.Tensor]], None], ...] = (
    made,
    written,
    fused,
    viewed,
    reshaped,
    differentiated,
    failing,
)


def measured(kind: Callable[[list[torch.Tensor]], None], size: int) -> dict[str, float]:
    """Seconds of one call for that size."""
    tensors = [torch.ones(4, device=REMOTE) for _ in range(size)]
    djinn.synchronize()
    wall, client, executor = time.perf_counter(), time.process_time(), executor_seconds()
    kind(tensors)
    return {
        "wall": time.perf_counter() - wall,
        "client": time.process_time() - client,
        "executor": executor_seconds() - executor,
    }


def main() -> None:
    """Measure, print a table, then JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 2000, 4000, 8000])
    sizes = parser.parse_args().sizes
    djinn.configure(threads=1)
    found: dict[str, Any] = {}
    for kind in KINDS:
        kind([torch.ones(4, device=REMOTE) for _ in range(8)])
        rows = [measured(kind, size) for size in sizes]
        spent = [row["client"] + row["executor"] for row in rows]
        exponent = math.log(spent[-1] / spent[0]) / math.log(sizes[-1] / sizes[0])
        found[kind.__name__] = {"rows": rows, "exponent": exponent}
        shown = "  ".join(f"{row['client']:.2f}+{row['executor']:.2f}" for row in rows)
        print(f"{kind.__name__:10} {shown}  exponent {exponent:.2f}", flush=True)
    print(json.dumps({"sizes": sizes, "kinds": found}))


if __name__ == "__main__":
    main()
