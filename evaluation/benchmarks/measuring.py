"""Harness of the benchmarks: cases with bars, alternating runs, a row per finished case, JSON at the end.

    python -m evaluation.benchmarks.bench_<subject> [--json] [--quick] [--case a,b] [--rounds 5] [--threads 1] [--save
        folder]

A script lists its cases and passes them to `main`. A case measures one thing and returns an `Outcome`: a number to
compare with the bar, and the figures behind it. `compare` alternates a reference and Djinn. `--small` uses the smallest
sizes and one round: it tests the script, measures nothing, and gives no verdicts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

Run = Callable[[], object]
Clock = Callable[[], float]
QUICK_ROUNDS = 2
SUFFERS = 1.03  # factor above which a reference that is slower beside Djinn than alone is reported


class CannotMeasureError(Exception):
    """This machine cannot measure the case. The message says why."""


NOT_MEASURED = "not_measured"  # JSON key of the reasons for null values


@attrs.frozen
class Effort:
    """Effort of a measurement: rounds, threads, and sizes.

    Attributes:
        rounds: number of alternations of reference and Djinn.
        threads: PyTorch threads on either side.
        quick: True for fewer calls per round.
        small: True for the smallest sizes.
    """

    rounds: int = 5
    threads: int = 1
    quick: bool = False
    small: bool = False

    def times(self, usual: int) -> int:
        """Return the number of calls per round. `usual`: the number without options."""
        return min(usual, 2) if self.small else max(2, usual // 4) if self.quick else usual


@attrs.frozen
class Outcome:
    """Result of a case: `value` is compared with the bar, `figures` are the numbers behind it, with units in their names."""

    value: float
    figures: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen
class Case:
    """A named measurement. `bar`: the maximum acceptable value, or None."""

    name: str
    bar: float | None
    measure: Callable[[Effort], Outcome]
    unit: str = "x"


@attrs.frozen
class Compared:
    """Median seconds per call of the reference and of Djinn, and the median of their ratios within rounds.

    `alone`: seconds of the reference while Djinn does not run.
    """

    reference: float
    ours: float
    ratio: float
    alone: float

    def outcome(self, **more: float) -> Outcome:
        """Return the ratio as the outcome, with the times in milliseconds as figures."""
        figures = {"alone ms": self.alone * 1e3, "reference ms": self.reference * 1e3, "ours ms": self.ours * 1e3}
        if self.reference > SUFFERS * self.alone:  # then the ratio is too favourable
            figures["reference over alone"] = self.reference / self.alone
        return Outcome(self.ratio, figures | more)


def median_of(run: Run, times: int, clock: Clock = time.perf_counter) -> float:
    """Return the median time of a call in seconds."""
    results = []
    for _ in range(times):
        start = clock()
        run()
        results.append(clock() - start)
    return statistics.median(results)


def compare(reference: Run, ours: Run, effort: Effort, times: int, alone: float) -> Compared:
    """Return the times of reference and Djinn, which alternate. Each is first in every other round.

    `alone`: seconds of the reference while Djinn does not run. The caller has warmed up both.
    """
    calls = effort.times(times)
    results: dict[str, list[float]] = {"reference": [], "ours": []}
    for turn in range(effort.rounds):
        order = [("reference", reference), ("ours", ours)]
        for name, run in order if turn % 2 else reversed(order):
            results[name].append(median_of(run, calls))
    ratios = [b / a for a, b in zip(results["reference"], results["ours"], strict=True)]
    medians = {name: statistics.median(seconds) for name, seconds in results.items()}
    return Compared(medians["reference"], medians["ours"], statistics.median(ratios), alone)


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """Set PyTorch's threads to `count` in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(title: str, cases: Sequence[Case], arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure the cases named on the command line. Exit with 1 if one failed."""
    options = _options(title, cases, arguments)
    rounds = 1 if options.small else options.rounds or (QUICK_ROUNDS if options.quick else 5)
    effort = Effort(rounds, options.threads, options.quick, options.small)
    print(f"{title}\n{'':32}{'value':>12}{'bar':>12}  verdict", flush=True)
    results: dict[str, Outcome] = {}
    missing: dict[str, str] = {}
    broken = 0
    with threads_of_torch(effort.threads):
        for case in cases:
            if any(_is_selected(name, case, cases) for name in options.case.split(",")):
                broken += not _measure(case, effort, results, missing)
                if options.save:
                    _save(Path(options.save) / f"{Path(sys.argv[0]).stem}.json", title, cases, results, effort)
    values: dict[str, Any] = {name: outcome.value for name, outcome in results.items()} | dict.fromkeys(missing)
    if missing:
        values[NOT_MEASURED] = missing
    if options.json:
        print(json.dumps(values), flush=True)
    if broken:
        sys.exit(1)
    return values


def _options(title: str, cases: Sequence[Case], arguments: Sequence[str] | None) -> argparse.Namespace:
    names = ", ".join(case.name for case in cases)
    parser = argparse.ArgumentParser(description=title, epilog=f"cases: {names}")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds, and fewer calls in each")
    parser.add_argument("--small", action="store_true", help="smallest sizes and one round, to test the script")
    parser.add_argument("--case", "--only", default="", help="names of cases, or their prefixes, separated by commas")
    parser.add_argument("--rounds", type=int, default=0, help="number of alternations of reference and Djinn")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch threads of the client and of the server")
    parser.add_argument("--save", default="", help="a folder for all figures, as JSON")
    options = parser.parse_args(arguments)
    unknown = {name for name in options.case.split(",") if not any(_is_selected(name, case, cases) for case in cases)}
    if unknown:
        parser.error(f"no case has the name {', '.join(sorted(unknown))}; there are {names}")
    return options


def _is_selected(name: str, case: Case, cases: Sequence[Case]) -> bool:
    """Return True if a name on the command line selects the case: its name, a prefix that names no case, or ""."""
    if not name or name == case.name:
        return True
    return case.name.startswith(f"{name}_") and all(name != other.name for other in cases)


def _measure(case: Case, effort: Effort, found: dict[str, Outcome], missing: dict[str, str]) -> bool:
    try:
        outcome = case.measure(effort)
    except CannotMeasureError as reason:
        print(f"{case.name:32}{'-':>12}{_format_value(case, case.bar):>12}  not here: {reason}", flush=True)
        missing[case.name] = str(reason)
        return True
    except Exception as error:
        missing[case.name] = f"{type(error).__name__}: {error}"
        print(f"{case.name:32}{'-':>12}{_format_value(case, case.bar):>12}  BROKEN", flush=True)
        traceback.print_exc()
        return False
    found[case.name] = outcome
    value, bar = _format_value(case, outcome.value), _format_value(case, case.bar)
    print(f"{case.name:32}{value:>12}{bar:>12}  {verdict(case, outcome, effort)}{_figures(outcome)}", flush=True)
    return True


def verdict(case: Case, outcome: Outcome, effort: Effort) -> str:
    """Return `met` or `missed`, or spaces if the case has no bar or was measured with the smallest sizes."""
    if case.bar is None or effort.small:
        return "     "
    return "met  " if outcome.value <= case.bar else "missed"


def _format_value(case: Case, value: float | None) -> str:
    if value is None:
        return "-"
    number = f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return number + ("" if case.unit == "x" else f" {case.unit}")


def _figures(outcome: Outcome) -> str:
    figures = ", ".join(f"{name} {value:,.4g}" for name, value in outcome.figures.items())
    return f"  ({figures})" if figures else ""


def _save(file: Path, title: str, cases: Sequence[Case], found: Mapping[str, Outcome], effort: Effort) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"name": case.name, "bar": case.bar, "unit": case.unit, **attrs.asdict(found[case.name])}
        for case in cases
        if case.name in found
    ]
    file.write_text(json.dumps({"title": title, "effort": attrs.asdict(effort), "cases": rows}, indent=1) + "\n")
