"""Decisions whether an optimization, or a placement over several executors, pays, from runs with it and without it."""

from __future__ import annotations

import statistics
from typing import Final

from djinn.hooks import OptimizationContext, OptimizationResult, PlacementTrial, Trial
from djinn_adaptive.ranks import chance_of_being_less

LOOKS: Final = (8, 16, 24, 40)  # runs of each way after which something may be decided
CHANCE: Final = 0.05 / len(LOOKS)  # of being wrong at one look; over all looks together one in twenty
LEAST: Final = 0.02  # a share of the time that is worth anything, unless the setting `least` says otherwise
CLEARLY: Final = 1.5  # as many times as long, all of the first four: no more is needed
FEW: Final = 0.25  # a share of the time that a single run of each way has to save; of n runs each an n-th of it
RUNS: Final = 8  # of a program in which several executors have to win back what moving its weights takes


class Adaptive:
    """Rewrites nothing. Is told what the executor took with another optimization and without it, and says whether it pays.

    The same of placements: what programs took on one executor, and over several.

    The comparison is the rank test of Mann and Whitney, so a slow run now and then does not count; it is made at a few
    numbers of runs, set beforehand, and the chance of being wrong is shared among them. What is not decided at the last stays.
    """

    name = "adaptive"
    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    after_placement = False
    tolerates_growth = True

    def __init__(self, least: float = LEAST) -> None:
        self._least = least

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Nothing: it judges what the others do."""
        del context
        return OptimizationResult(self.name, applied=False, reason="it watches whether the others pay")

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
        """True if several executors save time, by medians, and in a few runs as much as moving weights takes; else one is better.

        The fewer runs were measured the more has to be saved, because single runs mislead: one executor is right in doubt. The
        decision is made again with each run that follows, and the other way is looked at again now and then.
        """
        if not trial.alone or not trial.apart:
            return None
        one, several = statistics.median(trial.alone), statistics.median(trial.apart)
        least = max(self._least, FEW / min(len(trial.alone), len(trial.apart)))
        return several < (1 - least) * one and RUNS * (one - several) > trial.moving


def _clearly_less(ours: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """True if every run of one way took much less time than any run of the other, which need not be run any more."""
    return CLEARLY * max(ours) < min(other)
