"""History of a server: points of the past hour and day by tenant, and warnings, in bounded memory."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import attrs

from djinn_observability.dashboard.view import KINDS, STAGES, Alarm, Sample, alarms, make_view

POINT_SECONDS: Final = 5.0  # seconds between two points
POINTS: Final = 720  # maximum number of points of the past hour, and of the past day
POINTS_PER_MEAN: Final = 24  # points of the hour per point of the day: two minutes
MAX_NOTES: Final = 50  # per tenant
MERGE_SECONDS: Final = 60.0  # seconds in which equal alarms become one note with a count
MAX_TENANTS: Final = 64  # maximum tenants; the most recently seen are kept
ALL: Final = None  # key of the total over all tenants
# Names of a point's numbers, in order; stages in seconds per second, which is a number of devices.
FIELDS: Final = ("seconds", *KINDS, *STAGES, "sessions", "waiting", "requests", "tokens", "steps")

_T = TypeVar("_T")
# As doubles, because a tuple of numbers takes four times the memory; the first is the number of its status.
Point: TypeAlias = "array[float]"


class TenantHistory:
    """Points of one tenant, the newest last. `hour` has all points, `day` has means of consecutive points."""

    def __init__(self) -> None:
        self.hour: deque[Point] = deque(maxlen=POINTS)
        self.day: deque[Point] = deque(maxlen=POINTS)
        self._recent: list[Point] = []

    def add(self, point: Point) -> None:
        """Add a point."""
        self.hour.append(point)
        self._recent.append(point)

    def close(self, number: int) -> None:
        """Add the mean of all points since the last `close` to `day`, as point `number`."""
        if self._recent:
            _, seconds, *columns = zip(*self._recent, strict=True)
            means = [round(sum(column) / len(column), 4) for column in columns]
            self.day.append(array("d", (number, seconds[-1], *means)))
            self._recent.clear()


class History:
    """Points and warnings of a server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._points: dict[str | None, TenantHistory] = {}
        self._notes: dict[str | None, deque[tuple[float, Alarm]]] = {}
        self._last_sample: Sample | None = None
        self._number = 0

    def add(self, now: Sample, seconds: float | None = None) -> None:
        """Add the status `now` of all tenants. `seconds`: its time since 1970 (None: the present)."""
        before, self._last_sample = self._last_sample or now, now
        at = time.time() if seconds is None else seconds
        view = make_view(before, now)
        tenants = {executor["tenant"] for executor in view["executors"]} - {""}
        with self._lock:
            self._number += 1
            for tenant in (ALL, *sorted(tenants)):
                executors = [
                    executor_view
                    for executor_view in view["executors"]
                    if tenant is ALL or executor_view["tenant"] == tenant
                ]
                _entry_of(self._points, tenant, TenantHistory).add(_point(self._number, at, executors))
            for alarm in alarms(before.facts, now.facts):
                for key in {ALL, alarm.tenant} - {""}:
                    _add_note(_entry_of(self._notes, key, partial(deque, maxlen=MAX_NOTES)), at, alarm)
            if self._number % POINTS_PER_MEAN == 0:
                for past in self._points.values():
                    past.close(self._number)

    def points(self, tenant: str | None, after: int = 0) -> tuple[int, list[Point], list[Point]]:
        """Return the newest point's number, and a tenant's points of the past hour and day with numbers above `after`."""
        with self._lock:
            past = self._points.get(tenant, TenantHistory())
            return self._number, _newer(past.hour, after), _newer(past.day, after)

    def notes(self, tenant: str | None) -> list[dict[str, Any]]:
        """Return warnings about a tenant, the newest last."""
        with self._lock:
            return [alarm.note(at) for at, alarm in self._notes.get(tenant, ())]


def _add_note(notes: deque[tuple[float, Alarm]], at: float, alarm: Alarm) -> None:
    """Add an alarm. If an equal alarm came less than `MERGE_SECONDS` before, increase its count instead."""
    for position, (first_at, note) in enumerate(notes):
        if alarm.count and at - first_at < MERGE_SECONDS and attrs.evolve(note, count=alarm.count) == alarm:
            notes[position] = first_at, attrs.evolve(note, count=note.count + alarm.count)
            return
    notes.append((at, alarm))


def _entry_of(table: dict[str | None, _T], key: str | None, make: Callable[[], _T]) -> _T:
    """Return the entry of a key, or add a new one. If the table is full, evict the least recently used entry."""
    value = table.pop(key, None)
    table[key] = value = make() if value is None else value
    if len(table) > MAX_TENANTS:
        del table[next(iter(table))]
    return value


def _newer(points: deque[Point], after: int) -> list[Point]:
    """Return the points with numbers above `after`, without the numbers."""
    return [point[1:] for point in points if point[0] > after]


def _point(number: int, at: float, executors: list[dict[str, Any]]) -> Point:
    sessions = [session for executor in executors for session in executor["sessions"]]
    return array(
        "d",
        (
            number,
            round(at, 1),
            *(sum(executor["kinds"].get(kind, 0) for executor in executors) for kind in KINDS),
            *(round(sum(executor["stages"][stage] for executor in executors), 4) for stage in STAGES),
            len(sessions),
            sum(executor["waiting"] for executor in executors),
            round(sum(executor["requests"] for executor in executors), 2),
            round(sum(executor["tokens"] for executor in executors), 2),
            round(sum(session["steps"] for session in sessions), 2),
        ),
    )
