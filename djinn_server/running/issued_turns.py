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
        start_event, end_event: events before and after the ops.
        began_at, issued_at: times (`time.perf_counter`) at which the turn began, and at which its last op was issued.
    """

    shares: Sequence[T]
    start_event: Any
    end_event: Any
    began_at: float
    issued_at: float


class IssuedTurns(Generic[T]):
    """The issued turns of one accelerator, in the order in which it completes them.

    Only the session that has the device calls `begin` and `end`.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime, self._timer = runtime, DeviceTimer(runtime)
        self._issued: deque[IssuedTurn[T]] = deque()
        self._lock = threading.Lock()
        self._last_completion = 0.0

    def begin(self) -> Any:
        """Return an event before the ops of a new turn, or None if the device has failed."""
        try:
            return self._timer.mark()
        except RuntimeError:  # the session's own calls report the error
            return None

    def end(self, shares: Sequence[T], start_event: Any, began: float) -> Any:
        """Add a turn whose ops were issued. Return the event after the ops, or None if the device has failed.

        Args:
            shares: shares of the sessions in the turn.
            start_event: the result of `begin` for this turn.
            began: time (`time.perf_counter`) at which the turn began.
        """
        end_event = self.begin() if start_event is not None else None
        if end_event is not None:
            self._issued.append(IssuedTurn(shares, start_event, end_event, began, time.perf_counter()))
        return end_event

    def overdue_event(self) -> Any:
        """Return the event of the oldest incomplete turn if it was issued more than `ahead_seconds` ago, else None."""
        with self._lock:
            oldest = self._issued[0] if self._issued else None
        is_late = oldest is not None and time.perf_counter() - oldest.issued_at > self._runtime.ahead_seconds
        return oldest.end_event if is_late and oldest is not None else None

    def take_completed(self) -> Sequence[tuple[Sequence[T], float]]:
        """Remove the turns that the device has completed. Return the shares and the device seconds of each turn."""
        completed: list[tuple[Sequence[T], float]] = []
        with self._lock:
            try:
                while self._issued and self._timer.is_reached((turn := self._issued[0]).end_event):
                    self._issued.popleft()
                    completed.append((turn.shares, self._timer.seconds(turn.start_event, turn.end_event)))
                    self._last_completion = time.perf_counter()
            except RuntimeError:  # the session's own calls report the error
                self._issued.clear()
        return completed

    def running_since(self) -> float | None:
        """Return the time (`time.perf_counter`) since which the device runs the oldest incomplete turn, or None."""
        with self._lock:
            return max(self._issued[0].began_at, self._last_completion) if self._issued else None
