"""The number of steps that a stop check's reply may be late: the smallest that keeps client and executor busy."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Final

MAX_STEPS: Final = 32  # maximum number of steps that may have to be undone
_UNKNOWN: Final = 2  # steps until the link's round trip time is known
_RECENT: Final = 8  # measured steps to keep
_JITTER_SECONDS: Final = 0.001


class StepTimes:
    """Measures the duration of a step on both sides.

    A reply takes a round trip. The number of steps in that time depends on the slower side: the program, which issues
    steps, or the executor, which runs them.
    """

    def __init__(self, round_trip_seconds: float | None) -> None:
        self._round_trip = round_trip_seconds
        self._issuing: deque[float] = deque(maxlen=_RECENT)
        self._running: deque[float] = deque(maxlen=_RECENT)
        self._left_at: float | None = None
        self._spent_seconds: float | None = None

    def record_issued(self) -> None:
        """Record that the program has issued a step."""
        if self._left_at is not None:
            self._issuing.append(time.perf_counter() - self._left_at)

    def begin_next(self) -> None:
        """Record that the program begins to issue the next step."""
        self._left_at = time.perf_counter()

    def record_run(self, spent: float) -> None:
        """Record that the executor has run a step. `spent`: seconds that it has spent on all steps."""
        if self._spent_seconds is not None:
            self._running.append(spent - self._spent_seconds)
        self._spent_seconds = spent

    def lateness(self) -> int:
        """Return the number of steps whose replies may be pending at the same time."""
        step = max(min(self._issuing, default=0.0), min(self._running, default=0.0))
        if self._round_trip is None or step <= 0.0:
            return _UNKNOWN
        return min(math.ceil((self._round_trip + _JITTER_SECONDS) / step + 0.1), MAX_STEPS)
