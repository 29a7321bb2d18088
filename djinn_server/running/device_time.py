"""Clock of a device: measures the seconds in which ops run, not those in which they are issued."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from djinn_server.hookspecs.devices import DeviceRuntime


class DeviceTimer:
    """Mark moments between the ops of a device, and measure the seconds between moments.

    On a CPU a moment is a value of `time.perf_counter`. On an accelerator it is an event, which the device reaches later.

    Attributes:
        runs_late: True if ops may run after their calls have returned, as on an accelerator.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self.runs_late = runtime.device.type != "cpu"

    def mark(self) -> Any:
        """Return the moment after all ops issued so far. Raise RuntimeError if the device has failed."""
        return self._runtime.mark(timing=True) if self.runs_late else time.perf_counter()

    def is_reached(self, moment: Any) -> bool:
        """Return True if the device has reached a moment."""
        return not self.runs_late or bool(moment.query())

    def wait(self, moment: Any) -> None:
        """Wait until the device reaches a moment."""
        if self.runs_late:
            moment.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two moments that the device has reached."""
        if self.runs_late:
            return float(start.elapsed_time(end)) / 1e3  # events count in milliseconds
        return float(end - start)


class TimedSpans:
    """Time spans between moments, which the device may not have reached yet."""

    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer
        self._spans: deque[tuple[Any, Any]] = deque()

    def add(self, start: Any, end: Any) -> None:
        """Append the span between two moments. Spans must be added in the order in which they end."""
        self._spans.append((start, end))

    def take_seconds(self) -> float:
        """Return the total seconds of the spans whose end the device has reached since the last call."""
        seconds = 0.0
        while self._spans and self._timer.is_reached(self._spans[0][1]):
            seconds += self._timer.seconds(*self._spans.popleft())
        return seconds
