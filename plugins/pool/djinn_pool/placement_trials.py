"""Trials of placements: a program that a policy would divide runs on one executor first, then over several.

A plugin's judge compares the seconds from submission to results, and the program continues in the faster way. Single runs
mislead, so the slower way is measured again at growing intervals before the decision is final. During a trial, copies of
weights remain on both sides, so that a switch transfers no value twice.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import attrs

from djinn_client.runtime.planning.ab_tests import Verdicts, verdict_of
from djinn_client.runtime.sending.template import PreparedTemplate
from djinn_client.runtime.stats import Stats
from djinn_core.hookspecs.optimizations import Judge, PlacementTrial
from djinn_core.ir.placement import MARGIN
from djinn_core.ir.program import Program
from djinn_core.ir.result import TrialTimes
from djinn_core.logs import get_logger

LOOKS: Final = (
    2,
    6,
    16,
    40,
)  # measured runs of the chosen way per measured run of the other way
UNMEASURED: Final = 8  # consecutive unmeasured runs of the other way before it is abandoned
_log = get_logger("djinn.trials")


@attrs.define(eq=False)
class MeasuredWay:
    """Measurements of one way to run a program.

    Attributes:
        seconds: latencies of the measured runs.
        unmeasured: number of runs since the last measured run.
    """

    seconds: list[float] = attrs.field(factory=list)
    unmeasured: int = 0

    def record_seconds(self, seconds: float) -> None:
        """Record the latency of one run, from submission to results."""
        self.seconds.append(seconds)
        self.unmeasured = 0


@attrs.define(eq=False)
class TriedPlacement:
    """Measurements of both ways to run programs of one structure: on one executor and over several.

    Attributes:
        program: the first program.
        link_changes: number of link changes at the start. The trial is valid while this number stays.
        moving: predicted seconds of all transfers of inputs for the runs over several executors.
        alone: measurements on one executor.
        apart: measurements over several executors.
        pays: the judge's latest verdict: True if several executors are faster, None if it has not decided.
        settled: True if the verdict is final.
    """

    program: Program
    link_changes: int
    moving: float = 0.0
    alone: MeasuredWay = attrs.field(factory=MeasuredWay)
    apart: MeasuredWay = attrs.field(factory=MeasuredWay)
    pays: bool | None = None
    settled: bool = False

    def clock(self, *, apart: bool) -> Callable[[float], None] | None:
        """Return a function that records the seconds of a run, or None if the verdict is final.

        `apart`: True for a run over several executors.
        """
        return None if self.settled else (self.apart if apart else self.alone).record_seconds


def next_way(tried: TriedPlacement, pays: bool | None) -> bool | None:
    """Return how to run the program next: True over several executors, False on one. Return None if the trial is over.

    `pays`: the judge's present verdict, or None if it has not decided.
    """
    alone, apart = tried.alone, tried.apart
    if pays is None:
        return bool(alone.seconds) if apart.unmeasured < UNMEASURED else None
    preferred, rejected = (apart, alone) if pays else (alone, apart)
    samples_needed = 1 + sum(len(preferred.seconds) >= runs_at_test for runs_at_test in LOOKS)
    if len(rejected.seconds) < samples_needed and rejected.unmeasured < UNMEASURED:
        return not pays
    return pays if len(preferred.seconds) < LOOKS[-1] else None


class PlacementTrials:
    """Chooses between one executor and several for programs. Not thread-safe: the caller holds the recorders' lock."""

    def __init__(self, judge: Judge, policy: str, stats: Stats, verdicts: Verdicts) -> None:
        self._judge, self._policy, self._stats, self._verdicts = judge, policy, stats, verdicts

    def choose(self, tried: TriedPlacement) -> bool:
        """Return True to run the program over several executors in its next run. Update the trial."""
        if tried.settled:
            return bool(tried.pays)
        trial = PlacementTrial(self._policy, tuple(tried.alone.seconds), tuple(tried.apart.seconds), tried.moving)
        pays = verdict_of(self._judge, partial(self._judge.spreads, trial)) if trial.alone and trial.apart else None
        if pays is not tried.pays:
            self._record_verdict(tried, trial, pays)
        way = next_way(tried, pays)
        if way is None:
            tried.settled, tried.pays, way = True, bool(pays), bool(pays)
        preferred = tried.apart if way else tried.alone
        if way and not trial.apart and not preferred.unmeasured:
            self._stats.placements_tried += 1
        preferred.unmeasured += 1
        return way

    def forget(self, tried: TriedPlacement) -> None:
        """Drop the verdict about a program, because links or devices have changed."""
        self._verdicts.drop(tried.program, self._policy)

    def _record_verdict(self, tried: TriedPlacement, trial: PlacementTrial, pays: bool | None) -> None:
        tried.pays = pays
        self._verdicts.drop(tried.program, self._policy)
        if not trial.alone or not trial.apart:
            return
        measurement = TrialTimes.of(trial.alone, trial.apart)
        medians = {"one_ms": measurement.before * 1e3, "several_ms": measurement.after * 1e3}
        reason = reason_of(trial) if pays is False else ""
        self._verdicts.add(tried.program, self._policy, measurement, reason)
        if pays is not False:
            _log.debug("several executors are faster", policy=self._policy, **medians)
            return
        _log.info("several executors are not faster, the program runs on one", policy=self._policy, **medians)
        self._stats.placements_switched_off += 1


def reason_of(trial: PlacementTrial) -> str:
    """Return the measured reason why a program runs on one executor, as text."""
    one_executor, several = (statistics.median(seconds) * 1e3 for seconds in (trial.alone, trial.apart))
    runs = f"medians of {len(trial.alone)} and {len(trial.apart)} runs"
    return f"on one executor by measurement: {one_executor:.3g} ms on one, {several:.3g} ms over several, {runs}"


# --- prediction errors, and the required margin that follows from them --------------------------------------------

PRIOR: Final = 0.3  # the margin before enough was measured
MAX_MARGIN: Final = (
    0.4  # the maximum margin, also used for uncalibrated devices: two executors save at most half of the time
)
ENOUGH: Final = 5  # measured programs before errors are used
KEPT: Final = 64  # latest programs whose errors are used
SHARE: Final = 0.75  # share of programs whose error is smaller than the margin
RUNS: Final = 3  # runs of a program until its error is computed; the first run is excluded
NOTICED: Final = 1e-3  # in seconds; shorter programs gain nothing from several executors


def margin_of(errors: Sequence[float], *, calibrated: bool) -> float:
    """Return the share of a program's time that several executors must be predicted to save before they are used.

    Args:
        errors: |predicted - measured| / measured of earlier programs.
        calibrated: True if all devices have measured speeds.
    """
    if len(errors) < ENOUGH:
        return PRIOR if calibrated else MAX_MARGIN
    sorted_errors = sorted(errors)
    return min(MAX_MARGIN, max(MARGIN, sorted_errors[min(len(sorted_errors) - 1, int(SHARE * len(sorted_errors)))]))


@attrs.define(eq=False)
class PredictionErrors:
    """Relative errors of the predicted seconds of programs that ran on one executor. `found`: the latest errors."""

    found: deque[float] = attrs.field(factory=lambda: deque(maxlen=KEPT))

    def watch(self, prepared: PreparedTemplate, predicted: float) -> None:
        """Measure the first runs of a plan on its executor, and compare them with the predicted seconds."""
        measured_seconds: list[float] = []

        def took(seconds: float) -> None:
            measured_seconds.append(seconds)
            if len(measured_seconds) < RUNS:
                return
            prepared.note_seconds = None
            middle = statistics.median(measured_seconds[1:])
            if max(middle, predicted) >= NOTICED:
                self.found.append(abs(predicted - middle) / max(middle, 1e-9))

        prepared.note_seconds = took
