"""History of benchmarks: one JSON line per run of `make bench`, and regressions since the last release.

    python -m evaluation.benchmarks.history [--file evaluation/benchmarks/history.jsonl]

Runs are compared with those of the last release on the same kind of machine and with the same effort. Smaller values
are better. Differences within the spread of one release's runs are noise. With few runs the deviation is assumed to be
ASSUMED_DEVIATION until runs show another one.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

HERE = Path(__file__).resolve().parent
FILE = HERE / "history.jsonl"
LEAST_NOISE = 0.05  # minimum noise: even medians of several rounds differ by this share
ASSUMED_DEVIATION = 0.05  # prior standard deviation of a value, with the weight of ASSUMED_RUNS differences
ASSUMED_RUNS = 2
DEVIATIONS = 4.0  # standard deviations above which a difference counts: at most two false alarms in a hundred cases
AFTER = "after "


@attrs.frozen
class BenchRun:
    """One run.

    Attributes:
        commit: the measured commit, with a `+` if files had uncommitted changes.
        release: version of the commit, or `after X` if X was already released.
        machine: kind of machine and version of PyTorch. Only values of equal machines are compared.
        effort: arguments that shorten runs.
        values: value of each case, by subject and case.
    """

    commit: str
    release: str
    date: str
    machine: str
    effort: str
    values: Mapping[str, float]


@attrs.frozen
class Slower:
    """A regression: the value, the median of the last release's runs, and the noise as a share of this median."""

    case: str
    now: float
    before: float
    noise: float


def this_run(release: str, effort: str, values: Mapping[str, float]) -> BenchRun:
    """Return a run with these values, of the checked-out commit on this machine."""
    commit = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    changes = "+" if _git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":!{FILE.name}") else ""
    machine = f"{platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}"
    return BenchRun(
        commit + changes,
        _of_release(release),
        dt.datetime.now(tz=dt.UTC).date().isoformat(),
        machine,
        effort,
        dict(values),
    )


def _of_release(version: str) -> str:
    """Return `after VERSION` if the version's tag is on an earlier ancestor of HEAD, otherwise `version`."""
    tagged = _git("rev-list", "-n", "1", f"v{version}")
    is_behind = tagged and tagged == _git("merge-base", tagged, "HEAD") != _git("rev-parse", "HEAD")
    return AFTER + version if is_behind else version


def _git(*arguments: str) -> str:
    try:
        process = subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return process.stdout.strip()


def read(file: Path) -> list[BenchRun]:
    """Return the runs in a file, oldest first. Return an empty list without a file."""
    if not file.exists():
        return []
    return [BenchRun(**json.loads(line)) for line in file.read_text().splitlines() if line.strip()]


def add(file: Path, run: BenchRun) -> None:
    """Append a run."""
    line: dict[str, Any] = attrs.asdict(run)
    with file.open("a") as stream:
        stream.write(json.dumps(line, sort_keys=True) + "\n")


def last_release(runs: Sequence[BenchRun], now: BenchRun) -> list[BenchRun]:
    """Return the comparable runs of the last release before `now`, oldest first."""
    kind = now.machine, now.effort
    alike = [item for item in runs if (item.machine, item.effort) == kind and item.release not in {now.release, ""}]
    releases = [item for item in alike if not item.release.startswith(AFTER)]
    return [item for item in releases if item.release == releases[-1].release]


def noise(known: Sequence[float]) -> float:
    """Return the share of the median by which a value may be larger by chance."""
    middle = statistics.median(known)
    if middle <= 0:
        return LEAST_NOISE
    apart = sum((value / middle - 1) ** 2 for value in known) + ASSUMED_RUNS * ASSUMED_DEVIATION**2
    deviation = (apart / (len(known) - 1 + ASSUMED_RUNS)) ** 0.5
    return max(LEAST_NOISE, DEVIATIONS * deviation * (1 + 1 / len(known)) ** 0.5)


def slower(before: Sequence[BenchRun], now: BenchRun) -> list[Slower]:
    """Return the regressions beyond noise, largest first."""
    results = []
    for case, value in now.values.items():
        earlier_values = [one.values[case] for one in before if case in one.values]
        if earlier_values and value > statistics.median(earlier_values) * (1 + noise(earlier_values)):
            results.append(Slower(case, value, statistics.median(earlier_values), noise(earlier_values)))
    return sorted(results, key=lambda one: one.now / one.before if one.before else one.now, reverse=True)


def report(runs: Sequence[BenchRun], now: BenchRun) -> str:
    """Return the regressions as text."""
    before = last_release(runs, now)
    if not before:
        return "history: no earlier release was measured on this kind of machine with this effort, so there is no comparison"
    release, count = before[-1].release, len(before)
    result = slower(before, now)
    compared = len([case for case in now.values if any(case in item.values for item in before)])
    heading = f"history: {len(result)} of {compared} cases got slower beyond noise since {release} ({count} runs)"
    lines = [f"  {item.case:40}{item.now:12.4g} after {item.before:.4g}, noise {item.noise:.0%}" for item in result]
    return "\n".join([heading, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=FILE)
    runs = read(parser.parse_args().file)
    if not runs:
        raise SystemExit("the history has no run: `make bench` adds one")
    print(report(runs[:-1], runs[-1]))


if __name__ == "__main__":
    main()
