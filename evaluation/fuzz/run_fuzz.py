"""Malformed inputs for all decoders, mutations of real work for a live executor, bad arguments for ops.

    python -m evaluation fuzz [--inputs 10000000] [--mutations 1000000] [--calls 100] [--processes 2] [--seed 0]
                                  [--keep DIRECTORY] [--json]

`--calls` is per allowed op; 0 skips a part. Frames before a bug and the log of a live executor are stored in DIRECTORY.
With --json the last line is an object. Exits with 1 on bugs. On two idle cores the default takes about an hour: inputs
5 to 10 minutes, mutations 30 to 50, calls 5. Inputs are coverage-guided if `atheris` is installed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from djinn_core.errors import ProtocolError
from djinn_core.wire.compression import PLANES_ZSTD, compressed, expanded
from djinn_core.wire.frames import FrameDecoder, Limits
from djinn_core.wire.peer_messages import Item, View
from djinn_core.wire.upload_messages import UploadPart
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.peers.packed_values import allocate_item
from djinn_server.running.values import ValueTable
from djinn_server.weights.uploads import UploadAssembly
from evaluation.fuzz.decoding import resident
from evaluation.fuzz.targets import TARGETS

GUIDED = importlib.util.find_spec("atheris") is not None
TERABYTE = 1 << 40
# more inputs for decoders with more rules
WEIGHTS = {"frames": 4, "messages": 4, "templates": 3, "uploads": 2}


def decode(inputs: int, processes: int, seed: int) -> dict[str, Any]:
    """Run all targets, each in separate processes."""
    total = sum(WEIGHTS.get(name, 1) for name in TARGETS)
    shares = {name: inputs * WEIGHTS.get(name, 1) // total + 1 for name in TARGETS}
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        waiting = [pool.submit(_target, name, count, seed) for name, count in shares.items()]
        results = [item.result() for item in waiting]
    seconds = time.monotonic() - start
    bugs = [f"{item['target']}: {bug}" for item in results for bug in item["bugs"]]
    return {
        "inputs": sum(item["inputs"] for item in results),
        "guided": all(item["guided"] for item in results),
        "rate": round(sum(item["inputs"] for item in results) / seconds),
        "seconds": round(seconds),
        "slowest": max(item["slowest"] for item in results),
        "memory_growth": max(item["memory_growth"] for item in results),
        "targets": {item["target"]: item["inputs"] for item in results},
        "bugs": bugs,
    }


def _target(name: str, count: int, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "evaluation.fuzz.decoding", name]
    command += ["--inputs", str(count), "--seed", str(seed)]
    process = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    try:
        report: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        bug = f"the process ended with {process.returncode}: {process.stderr[-500:]}"
        return {"target": name, "guided": True, "inputs": 0, "slowest": 0.0, "memory_growth": 0, "bugs": [bug]}
    return report


def claims() -> dict[str, int]:
    """Return the growth of resident memory, in bytes, after input that announces a terabyte, by kind of input."""
    upload = UploadPart(5, "uint8", (TERABYTE,), (1,), TERABYTE)
    item = Item(TERABYTE, (View(5, "uint8", (TERABYTE,), (1,)),))
    prefix = struct.pack("<4sHHIIQQ", b"DJNF", 1, 0, 0, 1, TERABYTE, TERABYTE)
    claimed: list[object] = []
    attempts: dict[str, Callable[[], object]] = {
        "frame": lambda: claimed.append(FrameDecoder(Limits())) or claimed[-1].feed(prefix),
        "large_frame": lambda: claimed.append(FrameDecoder(Limits(body=2 * TERABYTE))) or claimed[-1].feed(prefix),
        "upload": lambda: (
            claimed.append(UploadAssembly(CpuRuntime(), ValueTable(), None)) or claimed[-1].take(upload, [bytearray(9)])
        ),
        "compressed": lambda: expanded(compressed(bytes(9), 1), PLANES_ZSTD, 1, TERABYTE),
        "transfer": lambda: claimed.append(allocate_item(item)),
    }
    growth = {}
    for name, try_it in attempts.items():
        before = resident()
        with contextlib.suppress(ProtocolError):
            try_it()
        growth[name] = max(0, resident() - before)
    return growth


def live(mutations: int, processes: int, seed: int, keep: Path | None) -> dict[str, Any]:
    """Run mutations of real work on a separate server."""
    command = ["-m", "evaluation.fuzz.live", "--mutations", str(mutations), "--connections", str(processes + 1)]
    return _outcome([*command, "--seed", str(seed), *(["--keep", str(keep)] if keep is not None else [])])


def ops(calls: int, seed: int) -> dict[str, Any]:
    """Run this number of calls of each allowed op."""
    return _outcome(["-m", "evaluation.fuzz.run_ops", "--calls", str(calls), "--seed", str(seed)])


def _outcome(command: list[str]) -> dict[str, Any]:
    variables = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [sys.executable, "-W", "ignore", *command], stdout=subprocess.PIPE, text=True, env=variables, check=False
    )
    lines = process.stdout.strip().splitlines()
    try:
        report: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"bugs": [f"{Path(command[0]).name} ended with {process.returncode}"]}
    return report


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--mutations", type=int, default=1_000_000)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    parts: dict[str, dict[str, Any]] = {}
    if options.inputs:
        if not GUIDED:
            print("atheris is not installed: inputs are drawn at random, not guided by coverage (pip install atheris)")
        parts["decoder"] = decode(options.inputs, options.processes, options.seed)
        parts["claims"] = {**claims(), "bugs": []}
    if options.mutations:
        parts["live"] = live(options.mutations, options.processes, options.seed, options.keep)
    if options.calls:
        parts["ops"] = ops(options.calls, options.seed)
    bugs = [f"{name}: {bug}" for name, part in parts.items() for bug in part["bugs"]]
    for name, part in parts.items():
        print(name, *(f"{key}={value}" for key, value in part.items() if not isinstance(value, list | dict)))
    for bug in bugs:
        print("BUG", bug)
    if options.json:
        print(json.dumps({**parts, "found": len(bugs)}))
    return bool(bugs)


if __name__ == "__main__":
    sys.exit(main())
