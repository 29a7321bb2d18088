"""Alternatives: a token of a toy GPT with a growing cache, divided by local eager PyTorch in the same run.

    python -m evaluation.benchmarks.bench_peers [--json] [--quick] [--case rpc]

`peers.py` describes the alternatives. Each runs in a separate process; those that are not installed are skipped.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from evaluation.benchmarks.bench_models import TOY, decode, measured
from evaluation.benchmarks.measuring import CannotMeasureError, Case, Effort, Outcome, main

TIMES = 48


def peer(name: str, effort: Effort) -> Outcome:
    """Return the median over rounds, and of the ratios within a round."""
    script = Path(__file__).with_name("peers.py")
    command = [sys.executable, "-W", "ignore", str(script), name]
    command += ["--times", str(effort.times(TIMES)), "--rounds", str(effort.rounds)]
    environment = os.environ | {"OMP_NUM_THREADS": str(effort.threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise CannotMeasureError(f"it failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if "not installed" in found:
        raise CannotMeasureError(found["not installed"])
    ratios = [b / a for a, b in zip(found["local"], found["peer"], strict=True)]
    milliseconds = {f"{who} ms": statistics.median(seconds) * 1e3 for who, seconds in found.items()}
    return Outcome(statistics.median(ratios), milliseconds)


CASES = (
    Case("djinn", None, partial(measured, decode(TIMES, **TOY), TIMES)),
    Case("rpc_for_every_op", None, partial(peer, "rpc")),
    Case("torch_rpc_with_the_model", None, partial(peer, "torch_rpc")),
    Case("ray_actor_with_the_model", None, partial(peer, "ray")),
    Case("mycelya_torch", None, partial(peer, "mycelya")),
    Case("monarch_actor_with_the_model", None, partial(peer, "monarch")),
)

if __name__ == "__main__":
    main("A token of a toy GPT, over local eager PyTorch", CASES)
