"""Errors of predicted times, and the margin that follows from them: what several executors have to be predicted to save."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Final

import attrs

from djinn_client.runtime.sending.template import PreparedTemplate
from djinn_core.ir.placement import MARGIN

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
