"""Clock of a device: measures the seconds in which ops run, not those in which they are issued."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from djinn_server.hookspecs.devices import DeviceRuntime


class DeviceTimer:
    """Mark moments between the ops of a device, and measure the seconds between moments.

    On a CPU a moment is a reading of `time.perf_counter`. On an accelerator it is an event, which the device reaches later.

    Attributes:
        runs_late: True if ops may run after their calls have returned.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self.runs_late = runtime.device.type != "cpu"

    def mark(self) -> Any:
        """Return the moment after the ops issued so far. Raises RuntimeError if the device has failed."""
        return self._runtime.mark(timing=True) if self.runs_late else time.perf_counter()

    def passed(self, moment: Any) -> bool:
        """Return True if the device has reached a moment."""
        return not self.runs_late or bool(moment.query())

    def wait(self, moment: Any) -> None:
        """Wait until the device reaches a moment."""
        if self.runs_late:
            moment.synchronize()

    def seconds(self, begun: Any, ended: Any) -> float:
        """Return the seconds between two moments that the device has reached."""
        if self.runs_late:
            return float(begun.elapsed_time(ended)) / 1e3  # events count in milliseconds
        return float(ended - begun)


class TimedSpans:
    """Time spans between moments, which the device may not have reached yet."""

    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer
        self._spans: deque[tuple[Any, Any]] = deque()

    def add(self, begun: Any, ended: Any) -> None:
        """Append a span."""
        self._spans.append((begun, ended))

    def take(self) -> float:
        """Return the total seconds of the spans that ended since the last call."""
        seconds = 0.0
        while self._spans and self._timer.passed(self._spans[0][1]):
            seconds += self._timer.seconds(*self._spans.popleft())
        return seconds
