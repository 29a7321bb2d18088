"""Assignment of new sessions to executors: the least loaded of those that a client may have."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

import attrs

from djinn_core.launch.orders import Sessions

LOOK_SECONDS: Final = 1.0  # for which a report says how loaded an executor is
RECENT_SECONDS: Final = 60.0


@attrs.frozen
class ExecutorLoad:
    """Load of an executor.

    Attributes:
        busy: share of the time between the last two reports in which it ran programs, from 0 to 1.
        beginning: sessions that were assigned since the last report. recent: those of the last minute. sessions: all that had
            begun by the last report.
        memory_free: bytes that are free on its device; None if they are not known.
    """

    busy: float = 0.0
    beginning: int = 0
    recent: int = 0
    sessions: int = 0
    memory_free: int | None = None


def least_loaded(loads: Sequence[ExecutorLoad]) -> int:
    """Position of the least loaded executor; the first of several.

    Sessions that are about to begin count as busy ones, because they come to work; sessions that do nothing hardly count: a
    training goes to an executor with many idle notebooks rather than to one with another training.
    """
    ranked = [
        (round(load.busy, 1) + load.beginning, load.recent, load.sessions, -(load.memory_free or 0)) for load in loads
    ]
    return ranked.index(min(ranked))


class LoadMeter:
    """Meter of the load of one executor, from its reports; for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = 0.0
        self._executed: tuple[float, float] | None = None  # when it was reported, and seconds
        self._load = ExecutorLoad()
        self._assigned: list[float] = []

    @property
    def is_due(self) -> bool:
        """True if the last report is too old."""
        return time.monotonic() - self._seen > LOOK_SECONDS

    def note(self, report: Sessions) -> None:
        """Note what the executor reports now."""
        now = time.monotonic()
        executed = report.metered.counters.get("execute_seconds", 0.0)
        with self._lock:
            before, self._executed, self._seen = self._executed, (now, executed), now
            busy = 0.0
            if before is not None and executed >= before[1]:  # else another process has taken its place
                busy = min(1.0, (executed - before[1]) / max(now - before[0], 1e-3))
            self._load = ExecutorLoad(busy, sessions=len(report.sessions), memory_free=report.device.memory_free)

    def assign(self) -> None:
        """Note that a session was assigned to it."""
        with self._lock:
            self._assigned.append(time.monotonic())

    def load(self) -> ExecutorLoad:
        """Its load, as far as it is known."""
        with self._lock:
            now = time.monotonic()
            self._assigned = [at for at in self._assigned if now - at < RECENT_SECONDS]
            beginning = sum(at > self._seen for at in self._assigned)
            return attrs.evolve(self._load, beginning=beginning, recent=len(self._assigned))
