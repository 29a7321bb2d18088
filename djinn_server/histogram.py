"""Histogram of durations. All histograms in `/metrics` have the same bounds."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Final

from djinn_core.wire.executor_reports import Distribution

# Upper bounds of the bins in seconds, from short decode steps to long submissions. A last bin has no bound.
BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """A histogram of durations, with the bins of `BOUNDS`."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def add(self, durations: Iterable[float]) -> None:
        """Add durations in seconds."""
        for seconds in durations:
            self._counts[bisect.bisect_left(BOUNDS, seconds)] += 1
            self._sum += seconds

    def include(self, other: Histogram) -> None:
        """Add all durations of another histogram."""
        self._counts = [first + second for first, second in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self._counts)

    def distribution(self, *labels: str) -> Distribution:
        """Return the histogram as a `Distribution` metric with these labels."""
        return Distribution(BOUNDS, tuple(self._counts), self._sum, labels)
