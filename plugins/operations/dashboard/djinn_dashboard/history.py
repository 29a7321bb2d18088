"""The past hour of a server: points by tenant, and warnings, in bounded memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Final

from djinn_dashboard.view import KINDS, STAGES, Sample, alarms, make_view

SECONDS: Final = 5.0  # between two points
POINTS: Final = 720  # an hour
NOTES: Final = 50
TENANTS: Final = 64  # of which those that were seen last are kept
ALL: Final = None  # the key of all tenants together
# Names of the numbers of a point, in order; stages in seconds a second, which is devices.
FIELDS: Final = ("seconds", *KINDS, *STAGES, "sessions", "waiting", "submissions", "steps")

Point = tuple[float, ...]


class History:
    """Points and warnings of a server, for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._points: dict[str | None, deque[Point]] = {}
        self._notes: dict[str | None, deque[dict[str, Any]]] = {}
        self._last: Sample | None = None
        self._number = 0

    def add(self, now: Sample, seconds: float | None = None) -> None:
        """Take in a status of all tenants, `seconds` after 1970 (None: now)."""
        before, self._last = self._last or now, now
        at = time.time() if seconds is None else seconds
        view = make_view(before, now)
        tenants = {executor["tenant"] for executor in view["executors"]} - {""}
        with self._lock:
            for tenant in (ALL, *sorted(tenants)):
                chosen = [one for one in view["executors"] if tenant is ALL or one["tenant"] == tenant]
                self._kept(self._points, tenant, POINTS).append(_point(at, chosen))
            for tenant, text in alarms(before.facts, now.facts):
                note = {"seconds": at, "tenant": tenant, "text": text}
                for key in {ALL, tenant} - {""}:
                    self._kept(self._notes, key, NOTES).append(note)
            self._number += 1

    def points(self, tenant: str | None, after: int = 0) -> tuple[int, list[Point]]:
        """Points of a tenant that came after the one of that number, and the number of the newest."""
        with self._lock:
            kept = self._points.get(tenant, ())
            new = min(len(kept), self._number - after)
            return self._number, list(kept)[len(kept) - new :] if new > 0 else []

    def notes(self, tenant: str | None) -> list[dict[str, Any]]:
        """Warnings that concern a tenant, the newest last."""
        with self._lock:
            return list(self._notes.get(tenant, ()))

    @staticmethod
    def _kept(table: dict[str | None, deque[Any]], key: str | None, most: int) -> deque[Any]:
        """The deque of a key, which is the one that was used last from now on; the one that was not used for longest goes."""
        found = table.pop(key, None)
        table[key] = found = deque(maxlen=most) if found is None else found
        if len(table) > TENANTS:
            del table[next(iter(table))]
        return found


def _point(at: float, executors: list[dict[str, Any]]) -> Point:
    sessions = [session for one in executors for session in one["sessions"]]
    return (
        round(at, 1),
        *(sum(one["kinds"].get(kind, 0) for one in executors) for kind in KINDS),
        *(round(sum(one["stages"][stage] for one in executors), 4) for stage in STAGES),
        len(sessions),
        sum(one["waiting"] for one in executors),
        round(sum(one["submissions"] for one in executors), 2),
        round(sum(session["steps"] for session in sessions), 2),
    )
