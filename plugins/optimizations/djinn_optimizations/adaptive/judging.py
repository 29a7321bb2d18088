"""Decisions whether an optimization, or a placement over several executors, pays, from runs with it and without it."""

from __future__ import annotations

import statistics
from typing import Final

from djinn.hooks import Judge, OptimizationContext, PlacementTrial, Trial
from djinn.planning import OptimizationResult
from djinn_optimizations.adaptive.ranks import chance_of_being_less

LOOKS: Final = (8, 16, 24, 40)  # runs of each way after which the test is made
CHANCE: Final = 0.05 / len(LOOKS)  # of a wrong decision at one look; over all looks together one in twenty
LEAST: Final = 0.02  # the smallest share of the time that is worth saving, unless the setting `least` says otherwise
CLEARLY: Final = 1.5  # times as long in each of the first four runs: no more runs are needed
FEW: Final = (
    0.25  # share of the time that has to be saved after a single run of each way; after n runs each, an n-th of it
)
RUNS: Final = 8  # of a program in which several executors have to save the time for moving its weights


class Adaptive(Judge):
    """Rewrites nothing. It is given the executor's times with and without another optimization, and decides if that one pays.

    It decides the same of placements, by times of programs on one executor and over several.

    The comparison is the rank test of Mann and Whitney, on which a slow run now and then has no effect. It is made after a few fixed
    numbers of runs, among which the chance of a wrong decision is shared. If the last look decides nothing, the optimization stays.
    """

    name = "adaptive"
    tolerates_growth = True

    def __init__(self, least: float = LEAST) -> None:
        self._least = least

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Nothing: it judges what the others do."""
        del context
        return OptimizationResult(self.name, applied=False, reason="it only measures whether the others pay")

    def pays(self, trial: Trial) -> bool | None:
        """True if the optimization saves time, or the last look does not tell; False if it costs time.

        None if more runs are needed.
        """
        counted = min(len(trial.with_it), len(trial.without))
        if counted < LOOKS[0]:
            return True if counted >= LOOKS[0] // 2 and _clearly_less(trial.with_it, trial.without) else None
        looks = [look for look in LOOKS if look <= counted]
        ours, other = trial.with_it[: looks[-1]], trial.without[: looks[-1]]
        if chance_of_being_less(ours, other) < CHANCE:
            return True
        worth = statistics.median(other) < (1 - self._least) * statistics.median(ours)
        if worth and chance_of_being_less(other, ours) < CHANCE:
            return False
        return True if looks[-1] == LOOKS[-1] else None

    def spreads(self, trial: PlacementTrial) -> bool | None:
        """True if several executors save time, by medians, and within a few runs as much as moving weights takes.

        The fewer runs were measured, the more time has to be saved, because single runs mislead; in doubt one executor is chosen. The
        decision is made again with each later run, and the other way is tried again now and then.
        """
        if not trial.alone or not trial.apart:
            return None
        one, several = statistics.median(trial.alone), statistics.median(trial.apart)
        least = max(self._least, FEW / min(len(trial.alone), len(trial.apart)))
        return several < (1 - least) * one and RUNS * (one - several) > trial.moving


def _clearly_less(ours: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """True if every run of one way took much less time than any run of the other, so that no more runs are needed."""
    return CLEARLY * max(ours) < min(other)
