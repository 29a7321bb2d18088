"""Decide by measured runs whether an optimization, or a placement on several executors, saves time."""

from __future__ import annotations

import statistics
from typing import Final

from djinn.hooks import Judge, OptimizationContext, PlacementTrial, Trial
from djinn.planning import OptimizationResult
from djinn_optimizations.adaptive.ranks import chance_of_being_less

LOOKS: Final = (8, 16, 24, 40)  # numbers of runs with, and of runs without, the optimization after which a test is made
ERROR_PROBABILITY: Final = 0.05 / len(LOOKS)  # of one test, so that all tests together have 0.05
MIN_SAVING: Final = 0.02  # default of the setting `least`
CLEAR_FACTOR: Final = (
    1.5  # after four runs of each kind, the optimization stays if all other runs took this many times as long
)
FIRST_RUN_MARGIN: Final = (
    0.25  # minimum saving, as a share of the time, after one run of each placement; 1/n of it after n runs
)
AMORTIZING_RUNS: Final = 8  # number of runs over several executors that must save the time for moving weights


class Adaptive(Judge):
    """Decide which other optimizations stay on. This optimization does not rewrite programs.

    It compares executor times of runs with and without an optimization by the Mann-Whitney rank test, which is robust
    against outliers. The test is repeated after the numbers of runs in `LOOKS`, and all repetitions together have the
    error probability 0.05. If the last test finds no difference, the optimization stays on.

    Placements on one executor and on several executors are compared by their median times.
    """

    name = "adaptive"
    tolerates_growth = True

    def __init__(self, min_saving: float = MIN_SAVING) -> None:
        self._min_saving = min_saving

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Return no rewrite."""
        del context
        return OptimizationResult(self.name, applied=False, reason="adaptive only measures other optimizations")

    def pays(self, trial: Trial) -> bool | None:
        """Return True to keep an optimization on, False to switch it off, or None if more runs are needed.

        It stays on if it saves time, or if the test after the last number of runs in `LOOKS` finds no difference.
        """
        rounds = min(len(trial.with_it), len(trial.without))
        if rounds < LOOKS[0]:
            return True if rounds >= LOOKS[0] // 2 and _is_clearly_faster(trial.with_it, trial.without) else None
        tests = [runs_at_test for runs_at_test in LOOKS if runs_at_test <= rounds]
        with_it, without_it = trial.with_it[: tests[-1]], trial.without[: tests[-1]]
        if chance_of_being_less(with_it, without_it) < ERROR_PROBABILITY:
            return True
        is_slower = statistics.median(without_it) < (1 - self._min_saving) * statistics.median(with_it)
        if is_slower and chance_of_being_less(without_it, with_it) < ERROR_PROBABILITY:
            return False
        return True if tests[-1] == LOOKS[-1] else None

    def spreads(self, trial: PlacementTrial) -> bool | None:
        """Return True if several executors save time, False if one executor is better, or None without measured runs.

        The median times decide. The saving must also pay for moving the weights. With few measured runs, the saving must
        be larger, because single runs mislead. The caller asks again after later runs.
        """
        if not trial.alone or not trial.apart:
            return None
        one_executor, several = statistics.median(trial.alone), statistics.median(trial.apart)
        min_saving = max(self._min_saving, FIRST_RUN_MARGIN / min(len(trial.alone), len(trial.apart)))
        return several < (1 - min_saving) * one_executor and AMORTIZING_RUNS * (one_executor - several) > trial.moving


def _is_clearly_faster(times: tuple[float, ...], other_times: tuple[float, ...]) -> bool:
    """Return True if each time in `times`, multiplied by `CLEAR_FACTOR`, is less than each time in `other_times`."""
    return CLEAR_FACTOR * max(times) < min(other_times)
