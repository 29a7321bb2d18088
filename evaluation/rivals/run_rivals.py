"""Programs for which other projects publish figures, over links of 0, 10, 45 and 116 ms, next to these figures.

    python -m evaluation rivals [--json] [--small] [--programs nanogpt,gpt2] [--round-trips-ms 0,45] [--save FILE]
        [--page]

Each program runs in a separate process for each link, with one thread on either side. Servers run on this machine in a
network namespace (`evaluation.benchmarks.links`). Llama 7B runs on a simulated device. Clients start with empty caches.
If the machine is busy at the start, seconds are left out of the tables. `--page` writes the tables and the picture into
the documents.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from evaluation import ROOT
from evaluation.benchmarks import links
from evaluation.rivals import tables
from evaluation.rivals.counting import PROGRAMS, Program
from evaluation.served import served

ROUND_TRIPS_MS = (0, 10, 45, 116)
CLUSTER = Path(__file__).with_name("gpu.toml")
SECONDS = 600  # timeout for one program
TOKEN = "evaluation-rivals-token"


@contextmanager
def start_server(device: str, inside: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """Run a server of a device at the other end of a link. Yield the environment variables of its client.

    `inside`: command prefix for programs at that end, or empty without a link.
    """
    network = ["--store-gib", "0"]
    if inside:
        network += ["--host", links.SERVER, "--insecure-plaintext-on-network"]
    options = {"DJINN_TOKEN": TOKEN, "DJINN_PLUGIN_SIMULATED_CLUSTER": str(CLUSTER)}
    with served(*network, device=device, prefix=inside, environment=options) as file:
        yield {"DJINN_SERVERS": file.tcp, "DJINN_TOKEN": file.token, "DJINN_DISABLE": "local"}


def count(name: str, options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Run the program `name` in a new process with empty caches. Return the figures of its phases."""
    command = [sys.executable, "-W", "ignore", "-m", "evaluation.rivals.counting", name]
    command += ["--small"] if options.small else []
    with tempfile.TemporaryDirectory() as folder:
        variables = os.environ | environment | {"XDG_CACHE_HOME": folder, "DJINN_CONFIG": os.devnull}
        return _run(command, variables)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, dict[str, float]]:
    process = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{process.stderr}")
    figures: dict[str, dict[str, float]] = json.loads(process.stdout.splitlines()[-1])
    return figures


def over_link(round_trip_ms: float, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the programs over one link. Yield the figures of all programs so far, with a raw socket's round trip."""
    conditions = links.Conditions(round_trip_ms / 1000)
    with ExitStack() as stack:
        inside = stack.enter_context(links.namespace(conditions))
        link = stack.enter_context(links.measured(inside, links.SERVER, lambda port: (links.SERVER, port)))
        devices = {PROGRAMS[name].device for name in options.programs}
        clients = {device: stack.enter_context(start_server(device, inside)) for device in sorted(devices)}
        results = {}
        for name in options.programs:
            results[name] = count(name, options, clients[PROGRAMS[name].device])
            print(tables.progress(name, round_trip_ms, results[name]), flush=True)
            yield {"round_trip_ms": round_trip_ms, "measured_ms": link * 1e3, "programs": results}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--small", action="store_true", help="the sizes of the tests")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="names, separated by commas")
    parser.add_argument("--round-trips-ms", default=",".join(map(str, ROUND_TRIPS_MS)))
    parser.add_argument("--save", type=Path, help="write the figures as JSON")
    parser.add_argument(
        "--page",
        action="store_true",
        help="write tables and picture into README.md, docs/images and evaluation/results",
    )
    parser.add_argument("--figures", type=Path, help="use the figures of an earlier run, which `--save` wrote")
    options = parser.parse_args()
    options.programs = options.programs.split(",")
    if unknown := set(options.programs) - set(PROGRAMS):
        parser.error(f"unknown programs: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    return options


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if not links.permitted():
        sys.exit("this evaluation needs permission to make network namespaces: run it as root")
    trips = [float(part) for part in options.round_trips_ms.split(",")]
    machine = f"{os.cpu_count()} processors ({platform.machine()}), PyTorch {torch.__version__}"
    results: dict[str, Any] = {"date": dt.datetime.now(dt.UTC).date().isoformat(), "machine": machine}
    results["busy"] = os.getloadavg()[0] > (os.cpu_count() or 1) / 2
    alone = [] if results["busy"] else [name for name in options.programs if PROGRAMS[name].device == "cpu"]
    results["local"] = {name: _local(name, options) for name in alone}
    before: list[dict[str, Any]] = []
    for trip in trips:
        for link in over_link(trip, options):
            results["links"] = [*before, link]
            if options.save:  # saved now, because a later program may fail
                options.save.write_text(json.dumps(results, indent=1) + "\n")
        before = results["links"]
    return results


def _local(name: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    program: Program = PROGRAMS[name]
    sizes = program.small if options.small else program.sizes
    command = [sys.executable, "-W", "ignore", "-m", "evaluation.rivals.counting", name, "--device", "cpu"]
    command += ["--sizes", *map(str, sizes)] if sizes else []
    figures = _run(command, os.environ)
    print(tables.progress(name, None, figures), flush=True)
    return figures


def main() -> None:
    """Measure, print and write."""
    options = _options()
    report = json.loads(options.figures.read_text()) if options.figures else _measure(options)
    if options.page:
        tables.write(report)
    print(tables.table(report))
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
