"""Pairs of short turns in one process, with something and without it: their ratio, and how sure it is.

Work beside them changes from second to second by more than one percent, so turns are short, each pair is made of neighbours, and every other
pair is the other way round. Processor time of all processes that take part is the least disturbed of what can be measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import attrs
import numpy as np

from djinn_core.system.processes import ThreadTimes

RESAMPLES = 2000


@attrs.frozen
class Ratio:
    """Median of the ratios of pairs, with the bounds of its 95% interval by bootstrap over pairs."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.low:.3f} to {self.high:.3f})"


@attrs.frozen
class Pairs:
    """Seconds of pairs of turns without and with something: of the clock on the wall, and of all processors together."""

    wall: list[tuple[float, float]] = attrs.field(factory=list)
    processors: list[tuple[float, float]] = attrs.field(factory=list)

    def milliseconds(self, steps: int) -> float:
        """Median of a step without it."""
        return 1e3 * statistics.median(without for without, _ in self.wall) / steps


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Ratio of turns with something to their neighbours without it."""
    found = np.array([with_it / without for without, with_it in pairs])
    picked = np.random.default_rng(0).integers(0, len(found), (RESAMPLES, len(found)))
    low, high = np.quantile(np.median(found[picked], axis=1), (0.025, 0.975))
    return Ratio(float(np.median(found)), float(low), float(high))


def take_turns(
    run: Callable[[], object],
    without: Callable[[], AbstractContextManager[object]],
    with_it: Callable[[], AbstractContextManager[object]],
    processes: Sequence[int],
    seconds: float,
) -> Pairs:
    """Pairs of runs in blocks of either kind, for about so long; each block begins with a run that is not counted."""
    times = [ThreadTimes(process) for process in processes]
    found, end = Pairs(), time.perf_counter() + seconds
    while time.perf_counter() < end or len(found.wall) < 2:
        pair: dict[int, tuple[float, float]] = {}
        order = ((0, without), (1, with_it))
        for place, block in order if len(found.wall) % 2 else reversed(order):
            with block():
                run()
                processor, begun = sum(one.read() for one in times), time.perf_counter()
                run()
                pair[place] = time.perf_counter() - begun, sum(one.read() for one in times) - processor
        found.wall.append((pair[0][0], pair[1][0]))
        found.processors.append((pair[0][1], pair[1][1]))
    return found
