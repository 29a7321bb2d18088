"""Compare random programs and PyTorch's operator databases on the remote device with the CPU.

    python -m evaluation differential --programs 2000 --seed 0

Prints the first difference of each program, in the smallest program that shows it, and ends with 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import attrs
import torch
from configured import configure_anew

import djinn
from djinn_client.interception.recording.recorder import recorders
from djinn_client.interception.runtime_interface import port
from evaluation.differential import known_differences
from evaluation.differential.differences import first_difference, smallest
from evaluation.differential.op_programs import entries, programs
from evaluation.differential.program_grammar import generated

CHUNK = 20  # programs or entries per process
SAMPLES = 1  # samples of each entry and layout

# Settings by seed: of 8 seeds, 6 use one executor, one sends small pieces, and one alternates two executors.
SETTINGS: dict[str, dict[str, Any]] = {
    "one executor": {},
    "pieces": {},
    "two executors": {"executors": 2, "placement_policy": "round_robin"},
}


def settings_of(seed: int) -> str:
    """Return the name of the settings for a seed."""
    return {3: "pieces", 7: "two executors"}.get(seed % 8, "one executor")


@attrs.frozen
class Work:
    """A batch of programs with the same settings. `numbers`: seeds, or, with `ops`, positions in the op databases."""

    settings: str
    numbers: tuple[int, ...]
    ops: bool = False
    shrink: bool = True


@attrs.frozen
class Finding:
    """A program that differs. `property`: the differing property. `text`: description of the difference."""

    name: str
    settings: str
    property: str
    text: str
    statements: tuple[str, ...]


_current: dict[str, Any] = {}


def _start() -> None:
    torch.set_num_threads(1)
    # kernels warn on stderr, but Djinn's log is checked
    log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
    os.dup2(log.fileno(), 2)
    _current["log"] = log


def _logged() -> str:
    """Return the log since the last call, without warnings of kernels."""
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
        recorders.limit_programs()


def _try(work: Work) -> tuple[list[Finding], Counter[str]]:
    _settle(work.settings)
    known_differences.needed.clear()
    findings = list(_in_ops(work) if work.ops else _in_programs(work))
    return findings, known_differences.needed


def _in_programs(work: Work) -> Iterator[Finding]:
    _logged()
    for seed in work.numbers:
        statements, expected = generated(seed)
        result = first_difference(statements, expected)
        if result is not None:
            result = smallest(result) if work.shrink else result
            yield Finding(f"seed {seed}", work.settings, result.difference.property, str(result), result.statements)
        elif log_lines := _logged():
            yield Finding(f"seed {seed}", work.settings, "log", log_lines, tuple(statements))


def _in_ops(work: Work) -> Iterator[Finding]:
    for number in work.numbers:
        for program in programs(entries()[number], SAMPLES):
            result = first_difference(program.statements, extra=program.names, close=program.close)
            if result is not None:
                yield Finding(program.name, work.settings, result.difference.property, str(result), program.statements)


def run(works: Sequence[Work], processes: int) -> tuple[list[Finding], Counter[str]]:
    """Run the batches. Return the findings, and the number of uses of each known difference."""
    findings: list[Finding] = []
    cpu_fallbacks: Counter[str] = Counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_start) as pool:
        futures = {pool.submit(_try, work): work for work in works}
        for future in as_completed(futures):
            try:
                result, counts = future.result()
            except Exception as error:  # a process that died ends the others
                work = futures[future]
                result, counts = [Finding(f"{work.numbers}", work.settings, "crash", repr(error), ())], Counter()
            cpu_fallbacks += counts
            findings += result
            for item in result:
                print(
                    f"--- {item.name}, {item.settings}, {item.property}",
                    *item.statements,
                    item.text,
                    sep="\n",
                    flush=True,
                )
    return findings, cpu_fallbacks


def works_of(seeds: range, every: int, shrink: bool) -> list[Work]:
    """Return batches of the seeds, and of every `every`-th entry of the op databases, or no entry if `every` is 0."""
    program_works = [
        (settings, [seed for seed in seeds if settings_of(seed) == settings]) for settings in reversed(SETTINGS)
    ]
    works = [
        Work(settings, tuple(mine[first : first + CHUNK]), shrink=shrink)
        for settings, mine in program_works
        for first in range(0, len(mine), CHUNK)
    ]
    choice = range(0, len(entries()), every) if every else range(0)
    return [
        *works,
        *(Work("one executor", tuple(choice[n : n + CHUNK]), ops=True) for n in range(0, len(choice), CHUNK)),
    ]


def keep(findings: Sequence[Finding], folder: Path) -> None:
    """Write programs that differ to `folder` as cases, which `test_cases.py` replays."""
    folder.mkdir(parents=True, exist_ok=True)
    for finding in findings:
        if finding.statements and finding.name.startswith("seed"):
            text = [f'"""{finding.property}: {finding.name}, {finding.settings}."""', "", *finding.statements, ""]
            (folder / f"{finding.property.replace(' ', '_')}_{finding.name.replace(' ', '_')}.py").write_text(
                "\n".join(text)
            )


def main() -> int:
    """Run programs and ops, and print the differences. Return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument(
        "--ops", type=int, nargs="?", const=1, default=0, help="also run every N-th entry of the op databases"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-shrink", action="store_true", help="do not shrink programs that differ")
    parser.add_argument("--keep", type=Path, help="write small programs that differ to this folder")
    parser.add_argument("--json", type=Path, help="also write the differences to this file")
    options = parser.parse_args()
    start = time.monotonic()
    works = works_of(range(options.seed, options.seed + options.programs), options.ops, not options.no_shrink)
    findings, cpu_fallbacks = run(works, options.processes)
    print(f"{options.programs} programs, {len(findings)} findings, {time.monotonic() - start:.0f} seconds")
    print(dict(Counter(f.property for f in findings)))
    for entry in known_differences.KNOWN:
        print(
            f"known, {cpu_fallbacks[entry.name]} times: {entry.name}"
            + " (no longer needed?)" * (not cpu_fallbacks[entry.name])
        )
    if options.keep:
        keep(findings, options.keep)
    if options.json:
        options.json.write_text(json.dumps([attrs.asdict(f) for f in findings], indent=2) + "\n")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
