"""`djinn.explain_waits()`: each round trip that a program waits for, with its line, its time, and advice."""

from __future__ import annotations

import linecache
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import attrs

from djinn_client.interception.tap import Cause, Tap, taps
from djinn_core.system.front_end import display_name, preformatted
from djinn_profiler.timeline.durations import duration, unit_of
from djinn_profiler.timeline.user_places import ADVICE, UserPlace, UserPlaces, line_of

_LINES: Final = 1000  # maximum number of distinct lines of a program


@attrs.frozen
class Wait:
    """Round trips of one line of the program.

    Attributes:
        file: file of the line that caused them; empty: no Python code of the user.
        line: number of the line.
        function: function of the line.
        text: text of the line.
        cause: the awaited result, such as `a number`.
        advice: a way to avoid the wait.
        times: number of round trips.
        seconds: total waiting time.
    """

    file: str
    line: int
    function: str
    text: str
    cause: str
    advice: str
    times: int
    seconds: float


class WaitReport(Tap):
    """Round trips inside a block of `explain_waits()`. `str()` returns a table of its lines, the longest wait first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places = UserPlaces()
        self._waits_by_place: dict[
            tuple[int, int, str], tuple[UserPlace, int, float]
        ] = {}  # keyed by identity of a code object

    def waited(self, cause: Cause, start_time: float, executor: int, number: int) -> None:  # noqa: ARG002
        """Record a wait of the current thread with its stack, as `Tap.waited`."""
        ended = time.perf_counter()
        place = self._places.find(sys._getframe(1), cause)  # noqa: SLF001 - the public ways build a list of all frames
        key = id(place[0]), *place[1:]
        with self._lock:
            _, times, seconds = self._waits_by_place.get(key, (place, 0, 0.0))
            if times or len(self._waits_by_place) < _LINES:
                self._waits_by_place[key] = place, times + 1, seconds + ended - start_time

    @property
    def waits(self) -> tuple[Wait, ...]:
        """Return lines that waited, the longest first."""
        with self._lock:
            places = list(self._waits_by_place.values())
        totals: dict[tuple[str, int, str, str], tuple[int, float]] = {}
        for place, count, seconds_at_place in places:  # a line may have several places
            key = line_of(place)
            times, seconds = totals.get(key, (0, 0.0))
            totals[key] = times + count, seconds + seconds_at_place
        return tuple(
            Wait(file, line, function, linecache.getline(file, line).strip(), cause, ADVICE[cause], times, seconds)
            for (file, line, function, cause), (times, seconds) in sorted(totals.items(), key=lambda wait: -wait[1][1])
        )

    @property
    def seconds(self) -> float:
        """Return the total seconds that the program waited."""
        return sum(wait.seconds for wait in self.waits)

    def __repr__(self) -> str:
        waits = self.waits
        times = sum(wait.times for wait in waits)
        return f"<WaitReport: {times} round trips, {duration(self.seconds)}, on {len(waits)} lines; print() shows the lines>"

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def __str__(self) -> str:
        """Return a table with a row for each line of the program, and advice below it."""
        waits = self.waits
        if not waits:
            return "the program waited for no round trip"
        lines = [f"{sum(wait.times for wait in waits)} round trips, {duration(self.seconds)}"]
        scale, unit = unit_of(self.seconds)
        for wait in waits:
            place = (
                f"{display_name(wait.file)}:{wait.line} in {wait.function}" if wait.file else "outside of Python code"
            )
            lines += [
                f"{wait.seconds * scale:9.3f} {unit} {wait.times:6} x  {wait.cause:22} {place}",
                f"{'':22}{wait.text}" if wait.text else "",
                f"{'':22}-> {wait.advice}",
            ]
        return "\n".join(line for line in lines if line)


@contextmanager
def explain_waits() -> Iterator[WaitReport]:
    """Context manager that lists each round trip for which the block waits: reason, line, time, and advice.

    Round trips without a wait are not listed, such as a copy with `non_blocking=True` that arrived in time. Finding the
    line costs some microseconds per round trip.
    """
    report = WaitReport()
    with taps.subscribed(report):
        yield report
