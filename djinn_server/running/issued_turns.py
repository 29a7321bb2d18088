"""Turns whose ops a device has not run yet: they bound the work that is issued ahead, and their events measure device time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from djinn_core.hookspecs.devices import DeviceRuntime
from djinn_server.running.turn_queue import Account


class IssuedTurns:
    """The turns of one accelerator in the order in which it completes them. Used by the device thread."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._issued: deque[tuple[Account, Any, Any, float]] = deque()

    def begin(self) -> Any:
        """Return an event before the ops of a turn; None if the device has failed."""
        try:
            return self._runtime.mark(timing=True)
        except RuntimeError:  # which the session's own calls report
            return None

    def end(self, account: Account, begun: Any) -> bool:
        """Note a turn whose ops are issued; False if its device time cannot be measured."""
        reached = self.begin() if begun is not None else None
        if reached is not None:
            self._issued.append((account, begun, reached, time.monotonic()))
        return reached is not None

    def settle(self) -> Sequence[tuple[Account, float]]:
        """Return the device time of turns that are over. Wait for those that were issued more than `ahead_seconds` ago."""
        found = []
        try:
            while self._issued:
                account, begun, reached, since = self._issued[0]
                if not reached.query():
                    if time.monotonic() - since <= self._runtime.ahead_seconds:
                        break
                    reached.synchronize()
                self._issued.popleft()
                found.append((account, begun.elapsed_time(reached) / 1e3))  # events count in milliseconds
        except RuntimeError:
            self._issued.clear()
        return found
