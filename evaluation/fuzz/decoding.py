"""Feed malformed inputs to one target, until it mishandles an input.

    python -m evaluation.fuzz.decoding TARGET --inputs 1000000 [--seed 0] [--random]

Coverage-guided if `atheris` is installed, unless `--random` is given. The last line is a JSON object. An input is a bug
if the target raises an undeclared exception, takes more than a second of processor time, or leaks memory.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

SLOW_SECONDS = 1.0
GROWTH_BYTES = 16 << 20  # maximum growth of resident memory by one input
LONGEST = 1 << 16  # maximum bytes of an input
BUGS_LIMIT = 20


def resident() -> int:
    """Return the resident bytes of this process."""
    with Path("/proc/self/statm").open() as figures:
        return int(figures.read().split()[1]) * resource.getpagesize()


@attrs.define
class Trial:
    """Run of one target with many inputs, and its results.

    Attributes:
        refused: number of inputs that raised an allowed exception. slowest: processor seconds of the slowest input.
        bugs: description with the hexadecimal input, by problem.
        before, peak: resident bytes at the start and at most.
    """

    read: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    inputs: int = 0
    refused: int = 0
    slowest: float = 0.0
    bugs: dict[str, str] = attrs.field(factory=dict)
    began: float = attrs.field(factory=time.monotonic)
    before: int = 0
    peak: int = 0

    def give(self, data: bytes) -> str | None:
        """Feed one input. Return the problem, or None."""
        self.inputs += 1
        start = time.thread_time()
        wrong = None
        try:
            self.read(data)
        except self.allowed as error:
            self.refused += 1
            wrong = None if str(error) else f"{type(error).__name__} says nothing"
        except Exception as error:
            wrong = f"{type(error).__name__}: {str(error)[:300]}"
        took = time.thread_time() - start
        self.slowest = max(self.slowest, took)
        if took > SLOW_SECONDS:
            wrong = f"took {took:.1f} s"
        if self.inputs % 512 == 0:
            self._weigh()
        if wrong and len(self.bugs) < BUGS_LIMIT:
            self.bugs.setdefault(wrong[:60], f"{wrong} <- {data[:400].hex()}{'...' if len(data) > 400 else ''}")
        return wrong

    def _weigh(self) -> None:
        now = resident()
        self.before = self.before or now
        self.peak = max(self.peak, now)

    def result(self, target: str, guided: bool) -> dict[str, Any]:
        """Return the report of the run."""
        seconds = time.monotonic() - self.began
        return {
            "target": target,
            "guided": guided,
            "inputs": self.inputs,
            "refused": self.refused,
            "seconds": round(seconds, 1),
            "rate": round(self.inputs / max(seconds, 1e-6)),
            "slowest": round(self.slowest, 4),
            "memory_growth": max(0, self.peak - self.before),
            "bugs": list(self.bugs.values()),
        }


def inputs_at_random(seeds: list[bytes], codec: Any, draw: random.Random) -> Iterator[bytes]:
    """Yield mutations of seeds, and sometimes of earlier mutations."""
    from evaluation.fuzz.mutating import mutated

    pool = list(seeds)
    while True:
        data = mutated(draw.choice(pool), draw, codec)[:LONGEST]
        yield data
        if draw.random() < 0.02:
            place = draw.randrange(len(pool) + 1)
            pool[place : place + 1] = [data] if place >= len(seeds) or len(pool) < 400 else [pool[place]]
            del pool[400:]


def run_at_random(name: str, count: int, seed: int) -> dict[str, Any]:
    """Run unguided mutations."""
    from evaluation.fuzz.targets import TARGETS

    target, draw = TARGETS[name](), random.Random(seed)
    trial = Trial(target.read, target.allowed)
    inputs = inputs_at_random(list(target.seeds(draw)), target.codec, draw)
    for _ in range(count):
        trial.give(next(inputs))
    return trial.result(name, guided=False)


def run_guided(name: str, count: int, seed: int) -> None:
    """Run coverage-guided mutations. Print the result and end the process."""
    import atheris

    with atheris.instrument_imports(
        include=["djinn_core.wire", "djinn_core.protocol", "djinn_core.ir.form", "djinn_server"]
    ):
        from evaluation.fuzz.targets import TARGETS
    from evaluation.fuzz.mutating import mutated

    target, draw = TARGETS[name](), random.Random(seed)
    trial = Trial(target.read, target.allowed)
    folder = Path(tempfile.mkdtemp())
    seeds = list(target.seeds(draw))
    for data in seeds:
        (folder / hashlib.sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)
    report = os.dup(1)

    def one(data: bytes) -> None:
        trial.give(data)
        if trial.inputs >= count:
            os.write(report, json.dumps(trial.result(name, guided=True)).encode() + b"\n")
            os._exit(0)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        if seed % 4 == 0:
            return atheris.Mutate(data, most)
        if seed % 4 == 1:  # C code has no coverage, so the fuzzer would forget good inputs
            data = seeds[seed // 4 % len(seeds)]
        return mutated(data, random.Random(seed), target.codec)[:most]

    arguments = [
        sys.argv[0],
        f"-runs={count * 2}",
        f"-seed={seed + 1}",
        "-max_len=16384",
        "-rss_limit_mb=0",
        "-mutate_depth=1",
        "-verbosity=0",
        f"-artifact_prefix={folder}/",
    ]
    atheris.Setup([*arguments, str(folder)], one, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random", action="store_true")
    options = parser.parse_args()
    if options.random or importlib.util.find_spec("atheris") is None:
        print(json.dumps(run_at_random(options.target, options.inputs, options.seed)))
    else:
        run_guided(options.target, options.inputs, options.seed)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
