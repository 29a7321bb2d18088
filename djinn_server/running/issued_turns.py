"""Turns of an accelerator that are issued but not complete.

They limit how much work is issued ahead, and their events measure device time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import attrs

from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.running.device_time import DeviceTimer

T = TypeVar("T")


@attrs.frozen
class IssuedTurn(Generic[T]):
    """A turn whose ops were issued.

    Attributes:
        shares: shares of the sessions in the turn.
        begun, reached: events before and after the ops.
        began, issued: times (`time.perf_counter`) at which the turn began and at which its last op was issued.
    """

    shares: Sequence[T]
    begun: Any
    reached: Any
    began: float
    issued: float


class IssuedTurns(Generic[T]):
    """The issued turns of one accelerator, in the order in which it completes them.

    Only the session that has the device calls `begin` and `end`.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime, self._timer = runtime, DeviceTimer(runtime)
        self._issued: deque[IssuedTurn[T]] = deque()
        self._lock = threading.Lock()
        self._settled_at = 0.0

    def begin(self) -> Any:
        """Return an event before the ops of a new turn; None if the device has failed."""
        try:
            return self._timer.mark()
        except RuntimeError:  # which the session's own calls report
            return None

    def end(self, shares: Sequence[T], begun: Any, began: float) -> Any:
        """Add a turn whose ops were issued. Return the event after the ops; None if its time cannot be measured."""
        reached = self.begin() if begun is not None else None
        if reached is not None:
            self._issued.append(IssuedTurn(shares, begun, reached, began, time.perf_counter()))
        return reached

    def late(self) -> Any:
        """Return the event of the oldest incomplete turn if it was issued more than `ahead_seconds` ago, else None."""
        with self._lock:
            oldest = self._issued[0] if self._issued else None
        is_late = oldest is not None and time.perf_counter() - oldest.issued > self._runtime.ahead_seconds
        return oldest.reached if is_late and oldest is not None else None

    def settle(self) -> Sequence[tuple[Sequence[T], float]]:
        """Remove and return the turns that the device has completed, each with its device time."""
        completed: list[tuple[Sequence[T], float]] = []
        with self._lock:
            try:
                while self._issued and self._timer.passed((turn := self._issued[0]).reached):
                    self._issued.popleft()
                    completed.append((turn.shares, self._timer.seconds(turn.begun, turn.reached)))
                    self._settled_at = time.perf_counter()
            except RuntimeError:  # which the session's own calls report
                self._issued.clear()
        return completed

    def running_since(self) -> float | None:
        """Return the time (`time.perf_counter`) since which the device runs the oldest turn; None if all are complete."""
        with self._lock:
            return max(self._issued[0].began, self._settled_at) if self._issued else None
