"""Call every allowed op with mutated and random arguments in processes that may crash, and report crashes.

    python -m evaluation.fuzz.run_ops [--calls 200] [--seed 0] [--match EXPRESSION] [--unchecked] [--json FILE]

Tensors lie at the edge of memory, so out-of-bounds reads crash. `--unchecked` disables the executor's own checks.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import re
import resource
import signal
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from djinn_core import torch_private
from djinn_core.ir.operators import OWN_OPERATORS, allowed_operators, resolve
from djinn_server.checks.rules import checked
from evaluation.fuzz.guarded import GuardedMemory
from evaluation.fuzz.op_arguments import Call, call, mutate
from evaluation.fuzz.real_calls import database_calls

CPU_SECONDS = 2.0
HEAP_BYTES = 1 << 30


class Rehearsal:
    """Calls of one op. A call's number determines its arguments."""

    def __init__(self, name: str, real: list[Call], seed: int, calls: int, function: Callable[..., Any]) -> None:
        self.name, self.real, self.seed, self.calls, self.function = name, real, seed, calls, function

    def arguments(self, number: int) -> Call:
        """Return the arguments of call `number`."""
        draw = random.Random(f"{self.seed} {self.name} {number}")
        inputs = mutate(draw, draw.choice(self.real)) if self.real and draw.random() < 0.8 else call(draw, self.name)
        guards = GuardedMemory.shared()
        at_end = draw.random() < 0.8
        return guards.place_all(inputs[0], at_end), {k: guards.place_all(v, at_end) for k, v in inputs[1].items()}

    def perform(self, number: int) -> bool:
        """Run call `number`. Return True if it returned, False if it raised."""
        positional, keywords = self.arguments(number)
        try:
            with torch.inference_mode():
                self.function(*positional, **keywords)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, MemoryError, OverflowError):
            return False
        except Exception as error:
            if "djinn" in type(error).__module__:
                return False
            raise
        return True


def rehearse(rehearsal: Rehearsal, progress: mmap.mmap) -> tuple[list[tuple[int, str]], int]:
    """Run calls in child processes until six crash. Return their numbers and signals, and how many calls returned."""
    crashes: list[tuple[int, str]] = []
    number = return_count = 0
    while number < rehearsal.calls:
        progress[:16] = struct.pack("<QQ", number, 0)
        child = os.fork()
        if not child:
            _child(rehearsal, number, progress)
        _, status = os.waitpid(child, 0)
        last, good = struct.unpack("<QQ", progress[:16])
        return_count += good
        if not status:
            break
        crashes.append((last, signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status}"))
        if len(crashes) >= 6:
            break
        number = last + 1
    return crashes, return_count


def _child(rehearsal: Rehearsal, first: int, progress: mmap.mmap) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    os.dup2(quiet, 1)
    status = 3
    try:
        memory_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes + HEAP_BYTES, memory_bytes + HEAP_BYTES))
        good = 0
        for number in range(first, rehearsal.calls):
            progress[:16] = struct.pack("<QQ", number, good)
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            good += rehearsal.perform(number)
        progress[:16] = struct.pack("<QQ", rehearsal.calls, good)
        status = 0
    finally:
        os._exit(status)


def describe(value: Any) -> str:
    """Return a short description of an argument."""
    if isinstance(value, torch.Tensor):
        content = f" {value.flatten()[:8].tolist()}" if not value.dtype.is_floating_point and value.numel() < 64 else ""
        return f"{str(value.dtype)[6:]}{list(value.shape)}/{list(value.stride())}{content}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe, value))}]"
    return repr(value)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--match", default="")
    parser.add_argument("--unchecked", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    real = database_calls()
    GuardedMemory.shared()
    progress = mmap.mmap(-1, 4096)
    start, calls, return_count, outcome = time.monotonic(), 0, 0, {}
    for name in sorted(allowed_operators() - OWN_OPERATORS):
        if not re.search(options.match, name):
            continue
        function = torch_private.kernel_of(resolve(name))
        if not options.unchecked:
            function = checked(name, resolve(name), function)
        rehearsal = Rehearsal(name, real.get(name, []), options.seed, options.calls, function)
        crashes, good = rehearse(rehearsal, progress)
        calls, return_count = calls + options.calls, return_count + good
        for number, how in crashes:
            inputs = rehearsal.arguments(number)
            outcome.setdefault(name, []).append(
                [how, describe(inputs[0]), {k: describe(v) for k, v in inputs[1].items()}]
            )
            print(how, name, *outcome[name][-1][1:], flush=True)
    bugs = [
        f"{how} {name} {inputs} {keywords}" for name, several in outcome.items() for how, inputs, keywords in several
    ]
    result = {
        "calls": calls,
        "returned": return_count,
        "seconds": round(time.monotonic() - start, 1),
        "ops": len(outcome),
        "bugs": bugs,
    }
    if options.json:
        options.json.write_text(json.dumps(outcome, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
