"""Decide by measured runs whether an optimization, or a placement on several executors, saves time."""

from __future__ import annotations

import statistics
from typing import Final

from djinn.hooks import Judge, OptimizationContext, PlacementTrial, Trial
from djinn.planning import OptimizationResult
from djinn_optimizations.adaptive.ranks import chance_of_being_less

LOOKS: Final = (8, 16, 24, 40)  # number of runs of each way at the tests
CHANCE: Final = 0.05 / len(LOOKS)  # error probability of one test; over all tests 0.05
LEAST: Final = 0.02  # the smallest share of the time worth saving, unless the setting `least` is given
CLEARLY: Final = 1.5  # decide after four runs if each is slower by this factor
FEW: Final = 0.25  # required saving after one run of each way, as a share of the time; after n runs, one n-th of it
RUNS: Final = 8  # number of runs over several executors that must save the time for moving weights


class Adaptive(Judge):
    """Decide which other optimizations stay on. This optimization does not rewrite programs.

    It compares executor times of runs with and without an optimization. In the same way, it compares a placement on one
    executor with a placement on several executors.

    The comparison is the Mann-Whitney rank test, which is robust against outliers. The test is repeated after a few
    fixed numbers of runs, and all repetitions together have a fixed error probability. If the last test finds no
    difference, the optimization stays on.
    """

    name = "adaptive"
    tolerates_growth = True

    def __init__(self, least: float = LEAST) -> None:
        self._least = least

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Return no rewrite."""
        del context
        return OptimizationResult(self.name, applied=False, reason="adaptive only measures other optimizations")

    def pays(self, trial: Trial) -> bool | None:
        """Return True to keep an optimization on, and False to switch it off. If more runs are needed, return None.

        An optimization stays on if it saves time, or if the last test finds no difference.
        """
        rounds = min(len(trial.with_it), len(trial.without))
        if rounds < LOOKS[0]:
            return True if rounds >= LOOKS[0] // 2 and _clearly_less(trial.with_it, trial.without) else None
        looks = [runs_at_test for runs_at_test in LOOKS if runs_at_test <= rounds]
        with_it, without_it = trial.with_it[: looks[-1]], trial.without[: looks[-1]]
        if chance_of_being_less(with_it, without_it) < CHANCE:
            return True
        worth = statistics.median(without_it) < (1 - self._least) * statistics.median(with_it)
        if worth and chance_of_being_less(without_it, with_it) < CHANCE:
            return False
        return True if looks[-1] == LOOKS[-1] else None

    def spreads(self, trial: PlacementTrial) -> bool | None:
        """Return True if several executors save time, by median times and the time to move weights.

        With few measured runs, the saving must be larger, because single runs mislead. If the saving is too small, one
        executor is used. Each later run updates the decision, and sometimes the other placement is tried again.
        """
        if not trial.alone or not trial.apart:
            return None
        one_executor, several = statistics.median(trial.alone), statistics.median(trial.apart)
        least = max(self._least, FEW / min(len(trial.alone), len(trial.apart)))
        return several < (1 - least) * one_executor and RUNS * (one_executor - several) > trial.moving


def _clearly_less(ours: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Return True if all runs in `ours` were much faster than all in `other`, so that no more are needed."""
    return CLEARLY * max(ours) < min(other)
