"""The pages below `/dashboard`, and the event feed for them."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path
from typing import Final

from djinn.hooks import Identity, WatchedServer
from djinn_observability.dashboard.history import FIELDS, Point
from djinn_observability.dashboard.responses import EventFeed, HttpResponse
from djinn_observability.dashboard.watcher import Watcher

_STATIC: Final = Path(__file__).parent / "static"
# Paths that need no token, with the file and its type: what a browser loads before a token can be typed.
_FILES: Final = {
    "": ("index.html", "text/html; charset=utf-8"),
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/chart.js": ("chart.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_FEED: Final = "/feed"
_END: Final = "/end/"  # and the name of a session, for POST


class Dashboard:
    """The dashboard: its files, and its event feed. Paths begin after `/dashboard`."""

    def __init__(self, server: WatchedServer) -> None:
        """Start the history."""
        self._server = server
        self._watcher = Watcher(server)

    def close(self) -> None:
        """Stop the history."""
        self._watcher.end()

    def file(self, path: str) -> HttpResponse | None:
        """Return the file at `path`, for which clients need no token, or None if no such file exists."""
        if path not in _FILES:
            return None
        name, kind = _FILES[path]
        return HttpResponse(HTTPStatus.OK, (_STATIC / name).read_bytes(), kind)

    def answer(self, path: str, identity: Identity) -> HttpResponse | EventFeed:
        """Return the response to a GET request for a path that is no file: the event feed, or an error."""
        if path != _FEED:
            return HttpResponse(HTTPStatus.NOT_FOUND, b"no such path; there are /dashboard and /dashboard/feed\n")
        return EventFeed(
            _Feed(self._watcher, None if identity.sees_all else identity.tenant, not identity.monitor).next
        )

    def act(self, path: str, identity: Identity) -> HttpResponse:
        """End the session that the path of a POST request names, and return the response."""
        if not path.startswith(_END):
            return HttpResponse(HTTPStatus.NOT_FOUND, b"POST /dashboard/end/SESSION ends a session\n")
        error = self._server.end(path.removeprefix(_END), identity)
        return HttpResponse(HTTPStatus.FORBIDDEN if error else HTTPStatus.OK, f"{error or 'ended'}\n".encode())


class _Feed:
    """Events for one viewer: the past hour and day first, then new points, each with the current view."""

    def __init__(self, watcher: Watcher, tenant: str | None, may_end: bool) -> None:
        self._watcher = watcher
        self._tenant = tenant
        self._may_end = may_end
        self._last_point = 0

    def next(self) -> bytes:
        """Return the next event, as JSON."""
        first = not self._last_point
        self._last_point, *points = self._watcher.history.points(self._tenant, self._last_point)
        hour, day = [[_numbers(point) for point in series] for series in points]
        message: dict[str, object] = {"tenant": self._tenant, "live": self._watcher.view(self._tenant)}
        message |= {"points": hour, "day": day}
        if first:
            message |= {"fields": FIELDS, "may_end": self._may_end}
        return json.dumps(message, separators=(",", ":")).encode()


def _numbers(point: Point) -> list[float]:
    """Convert a point for JSON. Whole numbers become integers."""
    return [int(number) if number.is_integer() else number for number in point]
