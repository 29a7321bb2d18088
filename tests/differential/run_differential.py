"""Random programs and PyTorch's operator database, on the CPU and on the remote device: all that a program can see is the same.

    python tests/differential/run_differential.py --programs 2000 --seed 0

Prints the first difference of each program, in the smallest program that shows it, and ends with 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "shared"), str(HERE.parent / "conformance")]

import known_differences  # noqa: E402
import torch  # noqa: E402
from configured import configure_anew  # noqa: E402
from differences import first_difference, smallest  # noqa: E402
from program_grammar import generated  # noqa: E402

import djinn  # noqa: E402
from djinn_core.interception.runtime_interface import port  # noqa: E402

CHUNK = 20  # programs that a process takes at a time

# Where programs run: of 8 seeds, 6 on one executor, one in pieces, and one on two executors in turns.
SETTINGS: dict[str, dict[str, Any]] = {
    "one executor": {},
    "pieces": {},
    "two executors": {"executors": 2, "placement_policy": "round_robin"},
}


def settings_of(seed: int) -> str:
    """Where the program of a seed runs."""
    return {3: "pieces", 7: "two executors"}.get(seed % 8, "one executor")


@attrs.frozen
class Work:
    """Programs of some seeds, which run in the same place."""

    settings: str
    seeds: tuple[int, ...]
    shrink: bool


@attrs.frozen
class Finding:
    """A program that differs: its seed, where it ran, the property and a text, and a program that shows it."""

    seed: int
    settings: str
    property: str
    text: str
    statements: tuple[str, ...]


_current: dict[str, Any] = {}


def _start() -> None:
    torch.set_num_threads(1)
    # kernels warn on stderr, here and on executors; what Djinn logs is looked at
    log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
    os.dup2(log.fileno(), 2)
    _current["log"] = log


def _logged() -> str:
    """What was logged since the last call, without the warnings of kernels."""
    text = os.pread(_current["log"].fileno(), 2**20, _current.get("read", 0))
    _current["read"] = _current.get("read", 0) + len(text)
    return "\n".join(line for line in text.decode().splitlines() if line and not line.startswith("[W"))


def _settle(settings: str) -> None:
    if _current.get("settings") != settings:
        _current["settings"] = settings
        configure_anew(threads=1, **SETTINGS[settings])
        djinn.init()
        pieces = _current.setdefault("pieces", port.checkpoint_instructions)
        port.checkpoint_instructions = 16 if settings == "pieces" else pieces


def _try(work: Work) -> tuple[list[Finding], Counter[str]]:
    _settle(work.settings)
    known_differences.needed.clear()
    findings = list(_findings(work))
    return findings, known_differences.needed


def _findings(work: Work) -> Iterator[Finding]:
    _logged()
    for seed in work.seeds:
        statements, expected = generated(seed)
        found = first_difference(statements, expected)
        if found is not None:
            found = smallest(found) if work.shrink else found
            yield Finding(seed, work.settings, found.difference.property, str(found), found.statements)
        elif logged := _logged():
            yield Finding(seed, work.settings, "log", logged, tuple(statements))


def run(seeds: range, processes: int, shrink: bool) -> tuple[list[Finding], Counter[str]]:
    """What differs, and how often each entry of the known differences was needed."""
    works = [
        Work(settings, tuple(mine[first : first + CHUNK]), shrink)
        for settings in reversed(SETTINGS)
        for mine in [[seed for seed in seeds if settings_of(seed) == settings]]
        for first in range(0, len(mine), CHUNK)
    ]
    findings: list[Finding] = []
    needed: Counter[str] = Counter()
    with multiprocessing.get_context("spawn").Pool(processes, _start) as pool:
        for found, counts in pool.imap_unordered(_try, works):
            needed += counts
            findings += found
            for one in found:
                print(f"--- seed {one.seed}, {one.settings}, {one.property}", *one.statements, one.text, sep="\n", flush=True)
        pool.close()
        pool.join()
    return findings, needed


def main() -> int:
    """Run programs and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-shrink", action="store_true", help="print programs that differ as they are")
    parser.add_argument("--json", type=Path, help="write what differs to this file, too")
    options = parser.parse_args()
    started = time.monotonic()
    findings, needed = run(range(options.seed, options.seed + options.programs), options.processes, not options.no_shrink)
    print(f"{options.programs} programs, {len(findings)} differ, {time.monotonic() - started:.0f} seconds")
    print(Counter(f.property for f in findings))
    for entry in known_differences.KNOWN:
        print(f"known, {needed[entry.name]} times: {entry.name}")
    if options.json:
        with contextlib.suppress(OSError):
            options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([attrs.asdict(f) for f in findings], indent=2) + "\n")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
