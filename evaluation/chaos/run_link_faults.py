"""A loop that reads a value in each step, over a link between network namespaces with packet loss, outages or changes.

    python -m evaluation link-faults [--json] [--round-trip-ms 45] [--cases sleep,moved]

The client is a process that adds one to a server tensor and reads it in each step, so a lost or repeated addition is
visible. A client that lost its session would fail. Each case reports the median step before and after the fault, the
longest step, and whether all values are right. Needs root.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from evaluation import ROOT
from evaluation.benchmarks import links
from evaluation.served import served

TOKEN = "evaluation-link-faults"
STEPS, BEFORE = 60, 20  # number of steps in total and before the fault
UPLOAD_FLOATS = 64 << 10  # floats per step
SECONDS = 240
CLIENT = """
import json, sys, time, torch, djinn
torch.set_num_threads(1)
steps, floats = map(int, sys.argv[1:])
held = torch.zeros(16, device="remote_accelerator:0")
began = time.perf_counter()
for step in range(steps):
    batch = torch.ones(floats).to(held.device) if floats else None
    held += 1 if batch is None else batch[0]
    value = held.sum().item() / 16
    print(json.dumps([time.perf_counter() - began, value]), flush=True)
"""


@attrs.frozen
class Case:
    """A fault of a link or its client.

    Attributes:
        conditions: initial conditions of the link.
        fault: function that causes the fault after some steps, given the client's process id, or None.
        floats: number of floats that each step uploads.
    """

    title: str
    conditions: links.Conditions
    fault: Callable[[int], object] | None = None
    floats: int = 0


def _sleep(seconds: float) -> Callable[[int], object]:
    def sleep(client: int) -> None:
        os.kill(client, signal.SIGSTOP)
        links.cut(up=False)
        time.sleep(seconds)
        links.cut(up=True)
        os.kill(client, signal.SIGCONT)

    return sleep


def _down(seconds: float) -> Callable[[int], object]:
    def down(client: int) -> None:
        links.cut(up=False)
        time.sleep(seconds)
        links.cut(up=True)

    return down


def cases(round_trip: float) -> dict[str, Case]:
    """Return the cases by name."""
    plain = links.Conditions(round_trip)
    return {
        "plain": Case("nothing", plain),
        "loss1": Case("1 % of packets lost each way", attrs.evolve(plain, loss=0.01)),
        "loss5": Case("5 % of packets lost each way", attrs.evolve(plain, loss=0.05)),
        "batch": Case("256 KiB uploaded in each step", plain, floats=UPLOAD_FLOATS),
        "uplink": Case(
            "256 KiB uploaded in each step, uplink of 10 Mbit/s from step 20 on", plain, lambda _: links.limit_uplink(1e7), UPLOAD_FLOATS
        ),
        "down": Case("link down for 5 s", plain, _down(5)),
        "sleep": Case("client stopped and link down for 30 s", plain, _sleep(30)),
        "moved": Case("client gets another address", plain, lambda _: links.move()),
    }  # fmt: skip


def run(case: Case) -> dict[str, Any]:
    """Run the loop with the fault of a case, and return the figures."""
    with links.namespace(case.conditions) as inside, tempfile.TemporaryDirectory() as cache:
        network = ["--host", links.SERVER, "--insecure-plaintext-on-network", "--store-gib", "0"]
        with served(*network, prefix=inside, environment={"DJINN_TOKEN": TOKEN}) as file:
            environment = {"DJINN_SERVERS": file.tcp, "DJINN_TOKEN": file.token, "DJINN_DISABLE": "local"}
            return _loop(case, environment | {"XDG_CACHE_HOME": cache, "DJINN_CONFIG": os.devnull})


def _loop(case: Case, environment: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-c", CLIENT, str(STEPS), str(case.floats)]
    client = subprocess.Popen(
        command, env=os.environ | environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    try:
        visited: list[tuple[float, float]] = []
        for line in client.stdout:
            visited.append(tuple(json.loads(line)))
            if len(visited) == BEFORE and case.fault is not None:
                case.fault(client.pid)
        _, errors = client.communicate(timeout=SECONDS)
    finally:
        client.kill()
        client.wait()
    times = [moment for moment, _ in visited]
    steps = [after - before for before, after in itertools.pairwise(times)]
    right = [value for _, value in visited] == [float(step + 1) for step in range(STEPS)]
    later = steps[BEFORE:]
    return {
        "case": case.title,
        "median_ms": statistics.median(steps[:BEFORE]) * 1e3 if steps else None,
        "median_after_ms": statistics.median(later) * 1e3 if later else None,
        "longest_seconds": max(steps, default=None),
        "steps": len(visited),
        "right": right,
        "error": "" if right else errors[-500:],
    }


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--round-trip-ms", type=float, default=45.0)
    parser.add_argument("--cases", default="", help="names, separated by commas")
    parser.add_argument("--save", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    if not links.permitted():
        sys.exit("this evaluation needs permission to make network namespaces: run it as root")
    all_cases = cases(options.round_trip_ms / 1000)
    names = options.cases.split(",") if options.cases else list(all_cases)
    if unknown := set(names) - set(all_cases):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}; there are {', '.join(all_cases)}")
    print(
        "| case | median step | median step afterwards | longest step | steps | right |\n| --- | --- | --- | --- | --- | --- |"
    )
    results = {}
    for name in names:
        item = results[name] = run(all_cases[name])
        figures = (
            f"{item['median_ms']:.0f} ms | {item['median_after_ms']:.0f} ms | {item['longest_seconds']:.1f} s"
            if item["right"]
            else "- | - | -"
        )
        print(
            f"| {item['case']} | {figures} | {item['steps']} | {'yes' if item['right'] else 'no: ' + item['error']} |",
            flush=True,
        )
    if options.save:
        options.save.write_text(json.dumps(results, indent=1) + "\n")
    if options.json:
        print(json.dumps(results))
    sys.exit(not all(item["right"] for item in results.values()))


if __name__ == "__main__":
    main()
