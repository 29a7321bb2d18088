"""HTTP routes for operators: liveness (`/livez`), readiness (`/readyz`) and Prometheus metrics (`/metrics`).

Every route requires a token (`Authorization: Bearer TOKEN`), except the probes where the operator opens them. `djinn token create NAME
--monitor` makes one that is valid for status, metrics and health alone. Pages of a plugin lie below its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

import attrs

from djinn_core.logs import get_logger
from djinn_server.gateway.context import GatewayContext
from djinn_server.hookspecs.authenticators import Credentials, Denial, Identity
from djinn_server.hookspecs.operations_pages import EventFeed, HttpResponse, OperationsPages, PageRequest

_log = get_logger("djinn.server")


@attrs.frozen
class Operations:
    """The routes and the state that they report.

    Attributes:
        export: gives the metrics and their content type for an `Accept` header.
        open_probes: True if the probes answer without a token, with a status alone.
    """

    context: GatewayContext
    export: Callable[[str], tuple[bytes, str]]
    open_probes: bool = False

    def serves_browsers(self, path: str) -> bool:
        """True for pages of plugins: operations routes refuse requests from web pages."""
        return path.partition("?")[0] not in ROUTES

    def is_probe(self, path: str) -> bool:
        """True for liveness and readiness."""
        return path in PROBES

    def admits(self, shown: Credentials) -> bool:
        """True while the credentials are valid."""
        return not isinstance(self.context.authentication.identify(shown), Denial)

    def answer(self, path: str, shown: Credentials, accept: str) -> HttpResponse | EventFeed:
        """Return the response to `GET path` from a client with these credentials."""
        name, rest = split_path(path)
        if self.open_probes and not shown.token and path in PROBES:
            return self._probe(path)
        pages = self.context.pages.get(name)
        if pages is not None and rest in pages.open_paths:
            return _ask(pages, pages.answer, PageRequest(rest))
        if pages is None and path not in ROUTES and not self.context.listeners:
            return HttpResponse(HTTPStatus.SERVICE_UNAVAILABLE, b"the server is starting or ends\n")
        who = self._identify(path, shown)
        if isinstance(who, HttpResponse):
            return who
        if pages is not None:
            return _ask(pages, pages.answer, PageRequest(rest, who))
        route = ROUTES.get(path)
        if route is None:
            there = ", ".join([*ROUTES, *(f"/{name}" for name in self.context.pages)])
            return HttpResponse(HTTPStatus.NOT_FOUND, f"there are {there}\n".encode())
        return route(self, who, accept)

    def act(self, path: str, shown: Credentials) -> HttpResponse | EventFeed:
        """Return the response to `POST path` from a client with these credentials."""
        name, rest = split_path(path)
        who = self._identify(path, shown)
        if isinstance(who, HttpResponse):
            return who
        pages = self.context.pages.get(name)
        if pages is None:
            return HttpResponse(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET is answered\n")
        return _ask(pages, pages.act, PageRequest(rest, who))

    def _identify(self, path: str, shown: Credentials) -> Identity | HttpResponse:
        who = self.context.authentication.identify(shown)
        if not isinstance(who, Denial):
            return who
        self.context.events.tell("refused", why=who.kind, asked=path[:64], peer=shown.peer, at="operations")
        return HttpResponse(HTTPStatus.UNAUTHORIZED, f"{who.reason}\n".encode())

    def livez(self, who: Identity, accept: str) -> HttpResponse:
        """Liveness: a process that does not answer should be restarted."""
        del who, accept
        return HttpResponse(HTTPStatus.OK, b"ok\n")

    def readyz(self, who: Identity, accept: str) -> HttpResponse:
        """Readiness: while it fails, send clients elsewhere."""
        del who, accept
        reason = self._why_not_ready()
        return HttpResponse(HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK, f"{reason or 'ok'}\n".encode())

    def metrics(self, who: Identity, accept: str) -> HttpResponse:
        """Counters and gauges for Prometheus, of all tenants, so only for the operator."""
        if not who.sees_all:
            return HttpResponse(
                HTTPStatus.FORBIDDEN, b"metrics are for the operator: ask for a token that may watch the server\n"
            )
        return HttpResponse(HTTPStatus.OK, *self.export(accept))

    def _probe(self, path: str) -> HttpResponse:
        """Return the response to a probe without a token: only an HTTP status, which tells if the server is ready."""
        if path == "/readyz" and self._why_not_ready():
            return HttpResponse(HTTPStatus.SERVICE_UNAVAILABLE, b"not ready\n")
        return HttpResponse(HTTPStatus.OK, b"ok\n")

    def _why_not_ready(self) -> str:
        """Return the reason why clients are not admitted now; empty if they are."""
        if self.context.draining.is_set():
            return "draining: no further clients are admitted"
        if not self.context.listeners:
            return "starting"
        return "" if self.context.tenants.ready else "an executor is being started"


def split_path(path: str) -> tuple[str, str]:
    """Split a path into its first name and the rest."""
    name, slash, rest = path.partition("?")[0].removeprefix("/").partition("/")
    return name, slash + rest


def _ask(
    pages: OperationsPages, respond: Callable[[PageRequest], HttpResponse | EventFeed], request: PageRequest
) -> HttpResponse | EventFeed:
    try:
        answer: object = respond(request)  # typed as object: plugins are not type-checked
        if not isinstance(answer, (HttpResponse, EventFeed)):
            raise TypeError(
                f"the pages {pages.name!r} returned a {type(answer).__name__}; return an HttpResponse or an EventFeed"
            )
    except Exception as error:
        _log.exception("pages of a plugin failed", pages=pages.name, path=request.path[:64], error=repr(error))
        return HttpResponse(HTTPStatus.INTERNAL_SERVER_ERROR, b"the page failed: the server's log has the reason\n")
    return answer


PROBES: Final = ("/livez", "/readyz")
Route = Callable[[Operations, Identity, str], HttpResponse]
ROUTES: Final[Mapping[str, Route]] = MappingProxyType(
    {"/livez": Operations.livez, "/readyz": Operations.readyz, "/metrics": Operations.metrics}
)
