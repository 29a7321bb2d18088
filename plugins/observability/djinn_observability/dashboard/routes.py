"""HTTP routes for operators: liveness, readiness, Prometheus metrics and the dashboard.

Every route requires a token (`Authorization: Bearer TOKEN`), except files of the dashboard. The operator may open the
probes as well.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import attrs

from djinn.hooks import Credentials, Denial, Identity, WatchedServer
from djinn_observability.dashboard.pages import Dashboard
from djinn_observability.dashboard.responses import EventFeed, HttpResponse

LIVE: Final = "/livez"
READY: Final = "/readyz"
METRICS: Final = "/metrics"
DASHBOARD: Final = "/dashboard"
PROBES: Final = (LIVE, READY)


@attrs.frozen
class Operations:
    """Responses of an operations server.

    Attributes:
        server: the server to report about.
        dashboard: pages of the dashboard.
        export: returns the metrics and their content type for an `Accept` header. None if only the dashboard is served.
        open_probes: True if probes need no token. They receive only an HTTP status.
    """

    server: WatchedServer
    dashboard: Dashboard
    export: Callable[[str], tuple[bytes, str]] | None = None
    open_probes: bool = False

    def serves_browsers(self, path: str) -> bool:
        """Return True if scripts of the dashboard may request a path."""
        return self._page_path(path) is not None

    def admits(self, credentials: Credentials) -> bool:
        """Return True while the credentials are valid."""
        return not isinstance(self.server.identify(credentials, ""), Denial)

    def answer(self, path: str, credentials: Credentials, accept: str) -> HttpResponse | EventFeed:
        """Return the response to `GET path` from a client with these credentials."""
        if self.open_probes and not credentials.token and path in PROBES:
            unready = path == READY and self.server.why_not_ready()
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, "not ready") if unready else _text(HTTPStatus.OK, "ok")
        page = self._page_path(path)
        file = self.dashboard.file(page) if page is not None else None
        if file is not None:
            return file
        identity = self.server.identify(credentials, path[:64])
        if isinstance(identity, Denial):
            return _text(HTTPStatus.UNAUTHORIZED, identity.reason)
        if page is not None:
            return self.dashboard.answer(page, identity)
        if self.export is None or path not in {*PROBES, METRICS}:
            paths = (DASHBOARD,) if self.export is None else (*PROBES, METRICS, DASHBOARD)
            return _text(HTTPStatus.NOT_FOUND, f"no such path; there are {', '.join(paths)}")
        return self._metrics(identity, self.export, accept) if path == METRICS else self._probe(path)

    def act(self, path: str, credentials: Credentials) -> HttpResponse:
        """Return the response to `POST path` from a client with these credentials."""
        identity = self.server.identify(credentials, path[:64])
        if isinstance(identity, Denial):
            return _text(HTTPStatus.UNAUTHORIZED, identity.reason)
        page = self._page_path(path)
        return (
            _text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered")
            if page is None
            else self.dashboard.act(page, identity)
        )

    def _page_path(self, path: str) -> str | None:
        """Return the part of a path after `/dashboard`, or None if the path is not below `/dashboard`."""
        page_path = path.partition("?")[0].removeprefix(DASHBOARD)
        return page_path if path.startswith(DASHBOARD) and page_path[:1] in {"", "/"} else None

    def _probe(self, path: str) -> HttpResponse:
        reason = self.server.why_not_ready() if path == READY else ""
        return _text(HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK, reason or "ok")

    def _metrics(self, identity: Identity, export: Callable[[str], tuple[bytes, str]], accept: str) -> HttpResponse:
        """Return the metrics of all tenants, if the client may see all tenants."""
        if not identity.sees_all:
            return _text(
                HTTPStatus.FORBIDDEN, "metrics are for the operator: ask for a token that may watch the server"
            )
        return HttpResponse(HTTPStatus.OK, *export(accept))


def _text(status: HTTPStatus, text: str) -> HttpResponse:
    return HttpResponse(status, f"{text}\n".encode())
