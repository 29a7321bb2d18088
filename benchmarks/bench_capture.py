"""What it costs the client to record an op that it has seen before, against the least that PyTorch lets it cost.

    python benchmarks/bench_capture.py [--json] [--rounds 30]

The reference is an empty `__torch_dispatch__` that builds one wrapper tensor. Nothing is sent: what was recorded is
thrown away between rounds. Times are in microseconds an op, the best round counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

import djinn
from djinn_core import torch_private
from djinn_core.interception.recording.recorder import current
from djinn_core.interception.tensors.storage import freed

DEVICE = torch.device("remote_accelerator:0")
CALLS = 1000


class Floor(torch.Tensor):
    """Does nothing but return a wrapper."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return torch_private.make_wrapper(cls, (4, 4), (4, 1), 0, torch.float32, DEVICE)

    __torch_function__ = torch_private.disabled_torch_function


OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x + 1.0,
    "view": lambda x: x.view(2, 8),
    "mm": lambda x: torch.mm(x, x),
    "in place": lambda x: x.add_(1.0),
}


def best_of(rounds: int, op: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> float:
    """Microseconds a call."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(CALLS):
            op(tensor)
        best = min(best, time.perf_counter() - start)
        current().entries.clear()
        freed.clear()
    return best / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    djinn.configure(checkpoint_instructions=10**9)
    with torch.no_grad():
        floor = best_of(options.rounds, OPS["add"], torch.empty(4, 4).as_subclass(Floor))
        remote = torch.empty(4, 4, device=DEVICE)
        cost = {name: best_of(options.rounds, op, remote) for name, op in OPS.items()}
    ratios = {f"capture_{name.replace(' ', '_')}_ratio": value / floor for name, value in cost.items()}
    if options.json:
        print(json.dumps({"floor_us": floor, **ratios}))
        return
    print(f"{'op':12}{'us':>8}{'over the floor':>18}")
    print(f"{'floor':12}{floor:8.2f}{1:18.2f}")
    for name, value in cost.items():
        print(f"{name:12}{value:8.2f}{value / floor:18.2f}")


if __name__ == "__main__":
    main()
