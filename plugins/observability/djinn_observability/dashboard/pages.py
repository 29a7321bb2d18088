"""The page `/dashboard` of the operations listener, and its feed."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Final

from djinn.hooks import EventFeed, HttpResponse, Identity, OperationsPages, PageRequest, WatchedServer
from djinn_observability.dashboard.history import FIELDS, Point
from djinn_observability.dashboard.watcher import Watcher

EndSession = Callable[[str, Identity], str]
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


class DashboardPages(OperationsPages):
    """The dashboard: its files, and the feed of its figures."""

    name = "dashboard"
    open_paths = frozenset(_FILES)

    def __init__(self) -> None:
        self._watcher: Watcher | None = None
        self._end: EndSession | None = None

    def begin(self, server: WatchedServer) -> None:
        """Start the history, as `OperationsPages.begin`."""
        self._watcher, self._end = Watcher(server), server.end

    def end(self) -> None:
        """Stop the history, as `OperationsPages.end`."""
        if self._watcher is not None:
            self._watcher.end()

    def answer(self, request: PageRequest) -> HttpResponse | EventFeed:
        """Answer a GET request, as `OperationsPages.answer`."""
        if request.path in _FILES:
            name, kind = _FILES[request.path]
            return HttpResponse(HTTPStatus.OK, (_STATIC / name).read_bytes(), kind)
        if request.path != _FEED or request.identity is None or self._watcher is None:
            return HttpResponse(HTTPStatus.NOT_FOUND, b"there are /dashboard and /dashboard/feed\n")
        identity = request.identity
        may_end = self._end is not None and not identity.monitor
        return EventFeed(_Feed(self._watcher, None if identity.sees_all else identity.tenant, may_end).next)

    def act(self, request: PageRequest) -> HttpResponse:
        """End a session, as `OperationsPages.act`."""
        if self._end is None or request.identity is None or not request.path.startswith(_END):
            return HttpResponse(HTTPStatus.NOT_FOUND, b"POST /dashboard/end/SESSION ends a session\n")
        error = self._end(request.path.removeprefix(_END), request.identity)
        return HttpResponse(HTTPStatus.FORBIDDEN if error else HTTPStatus.OK, f"{error or 'ended'}\n".encode())


class _Feed:
    """The events of one viewer: first the past hour and day, then new points, each with the current view."""

    def __init__(self, watcher: Watcher, tenant: str | None, may_end: bool) -> None:
        self._watcher = watcher
        self._tenant = tenant
        self._may_end = may_end
        self._seen = 0

    def next(self) -> bytes:
        """Return the next event, as JSON."""
        first = not self._seen
        self._seen, *points = self._watcher.history.points(self._tenant, self._seen)
        hour, day = [[_numbers(point) for point in some] for some in points]
        said: dict[str, object] = {"tenant": self._tenant, "live": self._watcher.view(self._tenant)}
        said |= {"points": hour, "day": day}
        if first:
            said |= {"fields": FIELDS, "may_end": self._may_end}
        return json.dumps(said, separators=(",", ":")).encode()


def _numbers(point: Point) -> list[float]:
    """Convert a point for JSON, with whole numbers as integers."""
    return [int(number) if number.is_integer() else number for number in point]
