"""Counts and times of the phases of one program, in a separate process.

    python -m evaluation.rivals.counting nanogpt [--small] [--device cpu]

The last line is a JSON object: the figures of each phase by name. A phase that repeats a step has the totals.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch

Device = str
Phase = Callable[..., AbstractContextManager[None]]
REMOTE = "remote_accelerator:0"
COUNTS = (
    "messages_sent",
    "messages_received",
    "round_trips",
    "submissions",
    "bytes_sent",
    "bytes_uploaded",
    "bytes_received",
)


@attrs.frozen
class Program:
    """A program of `evaluation.rivals.programs`.

    Attributes:
        title: name in tables.
        where: module and function, as `module:function`.
        sizes: arguments of the function for measurements.
        small: arguments of the function for the default test suite.
        device: device of the server. `simulated:0` only predicts times.
    """

    title: str
    where: str
    sizes: tuple[int, ...] = ()
    small: tuple[int, ...] = ()
    device: str = "cpu"


PROGRAMS = {
    "nanogpt": Program("nanoGPT 10.8M, batch 4 x 64, every fourth loss read", "nanogpt:run", (4, 64), (2, 16)),
    "resnet18": Program("ResNet-18, one picture of 224 x 224, every loss read", "resnet18:run", (1, 224), (2, 32)),
    "gpt2": Program("GPT-2 small, `generate()` of 64 tokens", "generation:run_gpt2", (12, 50_257), (2, 1000)),
    "llama7b": Program("Llama 7B, `generate()` of 64 tokens, structure only", "generation:run_llama", (32,), (2,), "simulated:0"),
    "diffusion": Program("Diffusion, 50 DDIM steps of a small U-Net", "diffusion:run", (32,), (16,)),
}  # fmt: skip


def count(program: Program, sizes: tuple[int, ...], device: Device) -> dict[str, dict[str, float]]:
    """Run a program with these arguments. Return the figures of each phase, by phase."""
    results: dict[str, dict[str, float]] = {}
    remote = device == REMOTE

    @contextmanager
    def phase(name: str, repetitions: int = 1) -> Iterator[None]:
        before, moments = _counts(remote), _seconds()
        yield  # a phase reads its last value, so no work is pending at its end
        seconds = {key: value - moments[key] for key, value in _seconds().items()}
        increases = {key: value - before[key] for key, value in _counts(remote).items()}
        results[name] = {"repetitions": repetitions, **seconds, **increases}

    module, _, function = program.where.partition(":")
    torch.manual_seed(0)
    if remote:
        import djinn

        djinn.init()  # messages of the connection do not belong to the program
    getattr(importlib.import_module(f"evaluation.rivals.programs.{module}"), function)(device, phase, *sizes)
    return results


def _seconds() -> dict[str, float]:
    return {"wall_seconds": time.perf_counter(), "client_seconds": time.process_time()}


def _counts(remote: bool) -> dict[str, float]:
    if not remote:
        return {}
    import djinn

    stats: dict[str, Any] = dict(djinn.stats())
    return {name: stats[name] for name in COUNTS} | {"executor_seconds": stats["server_execute_us"] / 1e6}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--small", action="store_true", help="the sizes of the tests")
    parser.add_argument("--sizes", type=int, nargs="+", help="other sizes")
    parser.add_argument("--device", default=REMOTE)
    options = parser.parse_args()
    program = PROGRAMS[options.program]
    sizes = tuple(options.sizes or (program.small if options.small else program.sizes))
    print(json.dumps(count(program, sizes, options.device)), flush=True)


if __name__ == "__main__":
    main()
