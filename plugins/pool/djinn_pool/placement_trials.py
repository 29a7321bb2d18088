"""Trials of placements: programs that a policy would divide run on one executor first, then over several; the faster way stays.

Values stay where they live while both ways are tried, and copies of weights are kept until it is decided, so that changing from
one way to the other moves nothing twice. A judge that a plugin offers gets the seconds from submission to results and decides. The
other way is run again a few times, ever more seldom, because single runs mislead; then the decision holds.
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
from djinn_core.ir.result import Measured
from djinn_core.logs import get_logger

LOOKS: Final = (
    2,
    6,
    16,
    40,
)  # measured runs of the way that is used, at each of which the other one is measured once more
UNMEASURED: Final = (
    8  # runs in a row of the way that is not used, after which it is given up: no thread waits for its results
)
_log = get_logger("djinn.trials")


@attrs.define(eq=False)
class MeasuredWay:
    """One way to run a program: measured seconds, and runs since the last that was measured."""

    seconds: list[float] = attrs.field(factory=list)
    unmeasured: int = 0

    def took(self, seconds: float) -> None:
        """Record a run from its submission to its results."""
        self.seconds.append(seconds)
        self.unmeasured = 0


@attrs.define(eq=False)
class TriedPlacement:
    """Ways to run programs of one structure, with what was measured of each.

    Attributes:
        program: the first one. link_changes: how often links had changed then: it holds for these.
        moving: as in `PlacementTrial`.
        pays: the judge's last verdict. settled: whether it holds for good.
    """

    program: Program
    link_changes: int
    moving: float = 0.0
    alone: MeasuredWay = attrs.field(factory=MeasuredWay)
    apart: MeasuredWay = attrs.field(factory=MeasuredWay)
    pays: bool | None = None
    settled: bool = False

    def clock(self, *, apart: bool) -> Callable[[float], None] | None:
        """The function to report the seconds of a run to; None if they do not matter any more."""
        return None if self.settled else (self.apart if apart else self.alone).took


def next_way(tried: TriedPlacement, pays: bool | None) -> bool | None:
    """True to run over several executors next, False on one; None if `pays` holds for good."""
    alone, apart = tried.alone, tried.apart
    if pays is None:
        return bool(alone.seconds) if apart.unmeasured < UNMEASURED else None
    used, other = (apart, alone) if pays else (alone, apart)
    wanted = 1 + sum(len(used.seconds) >= look for look in LOOKS)
    if len(other.seconds) < wanted and other.unmeasured < UNMEASURED:
        return not pays
    return pays if len(used.seconds) < LOOKS[-1] else None


class PlacementTrials:
    """Chooses between one executor and several. Not thread-safe: the recorders' lock is held around it."""

    def __init__(self, judge: Judge, policy: str, stats: Stats, verdicts: Verdicts) -> None:
        self._judge, self._policy, self._stats, self._verdicts = judge, policy, stats, verdicts

    def choose(self, tried: TriedPlacement) -> bool:
        """True to run the program over several executors this time."""
        if tried.settled:
            return bool(tried.pays)
        trial = PlacementTrial(self._policy, tuple(tried.alone.seconds), tuple(tried.apart.seconds), tried.moving)
        pays = verdict_of(self._judge, partial(self._judge.spreads, trial)) if trial.alone and trial.apart else None
        if pays is not tried.pays:
            self._tell(tried, trial, pays)
        way = next_way(tried, pays)
        if way is None:
            tried.settled, tried.pays, way = True, bool(pays), bool(pays)
        used = tried.apart if way else tried.alone
        if way and not trial.apart and not used.unmeasured:
            self._stats.placements_tried += 1
        used.unmeasured += 1
        return way

    def forget(self, tried: TriedPlacement) -> None:
        """Drop the verdict: links or devices have changed."""
        self._verdicts.drop(tried.program, self._policy)

    def _tell(self, tried: TriedPlacement, trial: PlacementTrial, pays: bool | None) -> None:
        tried.pays = pays
        self._verdicts.drop(tried.program, self._policy)
        if not trial.alone or not trial.apart:
            return
        measured = Measured.of(trial.alone, trial.apart)
        medians = {"one_ms": measured.before * 1e3, "several_ms": measured.after * 1e3}
        reason = reason_of(trial) if pays is False else ""
        self._verdicts.add(tried.program, self._policy, measured, reason)
        if pays is not False:
            _log.debug("several executors pay", policy=self._policy, **medians)
            return
        _log.info("several executors do not pay here: the program runs on one", policy=self._policy, **medians)
        self._stats.placements_switched_off += 1


def reason_of(trial: PlacementTrial) -> str:
    """Reason why a program runs on one executor."""
    one, several = (statistics.median(seconds) * 1e3 for seconds in (trial.alone, trial.apart))
    runs = f"medians of {len(trial.alone)} and {len(trial.apart)} runs"
    return f"on one executor by measurement: {one:.3g} ms there, {several:.3g} ms over several, {runs}"


# --- errors of predictions, and the margin that follows from them ------------------------------------------------

PRIOR: Final = 0.3  # the margin before enough was measured
MOST: Final = 0.4  # the greatest margin, and that of devices that were not calibrated: two executors save half at most
ENOUGH: Final = 5  # programs whose errors tell something
KEPT: Final = 64  # programs that count, the latest ones
SHARE: Final = 0.75  # of the programs have a smaller error than the margin
RUNS: Final = 3  # of a program, until its error is known; the first one does not count
NOTICED: Final = 1e-3  # seconds; programs shorter than this, predicted and measured, gain nothing by several executors


def margin_of(errors: Sequence[float], *, calibrated: bool) -> float:
    """The share of its time that several executors have to be predicted to save a program.

    `errors`: |predicted - measured| / measured, of one program each.
    """
    if len(errors) < ENOUGH:
        return PRIOR if calibrated else MOST
    ranked = sorted(errors)
    return min(MOST, max(MARGIN, ranked[min(len(ranked) - 1, int(SHARE * len(ranked)))]))


@attrs.define(eq=False)
class PredictionErrors:
    """Errors of predictions so far, of programs that ran on one executor."""

    found: deque[float] = attrs.field(factory=lambda: deque(maxlen=KEPT))

    def watch(self, prepared: PreparedTemplate, predicted: float) -> None:
        """Measure what the executor takes for the first runs of a plan, which was predicted to take that many seconds."""
        measured: list[float] = []

        def took(seconds: float) -> None:
            measured.append(seconds)
            if len(measured) < RUNS:
                return
            prepared.took = None
            middle = statistics.median(measured[1:])
            if max(middle, predicted) >= NOTICED:
                self.found.append(abs(predicted - middle) / max(middle, 1e-9))

        prepared.took = took
