"""Malformed inputs for everything that reads bytes from elsewhere, mutations of real work for a live executor, bad arguments for ops.

    python tests/fuzz/run_fuzz.py [--inputs 10000000] [--mutations 1000000] [--calls 100] [--processes 2] [--seed 0] [--json]

`--calls` are for each allowed op. With --json one object on the last line. On two cores, inputs take about six minutes, mutations an hour,
calls eight minutes. Ends with status 1 where there are bugs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from targets import TARGETS

HERE = Path(__file__).parent
# Where the rules are many, so are the inputs.
WEIGHTS = {"frames": 4, "messages": 4, "templates": 3, "uploads": 2}


def decode(inputs: int, processes: int, seed: int) -> dict[str, Any]:
    """All targets, each in processes of its own."""
    total = sum(WEIGHTS.get(name, 1) for name in TARGETS)
    shares = {name: inputs * WEIGHTS.get(name, 1) // total + 1 for name in TARGETS}
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        waiting = [pool.submit(_target, name, count, seed) for name, count in shares.items()]
        found = [one.result() for one in waiting]
    seconds = time.monotonic() - began
    bugs = [f"{one['target']}: {bug}" for one in found for bug in one["bugs"]]
    return {
        "inputs": sum(one["inputs"] for one in found),
        "guided": all(one["guided"] for one in found),
        "rate": round(sum(one["inputs"] for one in found) / seconds),
        "seconds": round(seconds),
        "slowest": max(one["slowest"] for one in found),
        "memory_growth": max(one["memory_growth"] for one in found),
        "targets": {one["target"]: one["inputs"] for one in found},
        "bugs": bugs,
    }


def _target(name: str, count: int, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(HERE / "decoding.py"), name]
    command += ["--inputs", str(count), "--seed", str(seed)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        bug = f"the process ended with {done.returncode}: {done.stderr[-500:]}"
        return {"target": name, "guided": True, "inputs": 0, "slowest": 0.0, "memory_growth": 0, "bugs": [bug]}
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    decoder = decode(options.inputs, options.processes, options.seed)
    for bug in decoder["bugs"]:
        print("BUG", bug)
    if options.json:
        print(json.dumps({"decoder": decoder, "bugs": len(decoder["bugs"])}))
    return bool(decoder["bugs"])


if __name__ == "__main__":
    sys.exit(main())
