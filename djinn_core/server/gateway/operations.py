"""HTTP routes for operators: liveness (`/livez`), readiness (`/readyz`) and Prometheus metrics (`/metrics`).

Every route requires a token: `Authorization: Bearer TOKEN`. `djinn token create NAME --monitor` makes one that is valid for
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

import attrs

from djinn_core.hookspecs.authentication import Credentials, Denial, Identity
from djinn_core.server.gateway.context import GatewayContext


@attrs.frozen
class HttpResponse:
    """An HTTP response of a route."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


@attrs.frozen
class Operations:
    """The routes and the state that they report.

    Attributes:
        export: the metrics and their content type, for an `Accept` header.
    """

    context: GatewayContext
    export: Callable[[str], tuple[bytes, str]]

    def answer(self, path: str, shown: Credentials, accept: str) -> HttpResponse:
        """The response to `GET path` from a client with these credentials."""
        who = self.context.gatekeeper.identify(shown)
        if isinstance(who, Denial):
            self.context.events.note("refused", why=who.kind, asked=path[:64], peer=shown.peer, at="operations")
            return HttpResponse(HTTPStatus.UNAUTHORIZED, f"{who.reason}\n".encode())
        route = ROUTES.get(path)
        if route is None:
            return HttpResponse(HTTPStatus.NOT_FOUND, f"there are {', '.join(ROUTES)}\n".encode())
        return route(self, who, accept)

    def livez(self, who: Identity, accept: str) -> HttpResponse:
        """Liveness: a process that does not answer should be restarted."""
        del who, accept
        return HttpResponse(HTTPStatus.OK, b"ok\n")

    def readyz(self, who: Identity, accept: str) -> HttpResponse:
        """Readiness: while it fails, clients should be sent elsewhere."""
        del who, accept
        reason = self._why_not_ready()
        return HttpResponse(HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK, f"{reason or 'ok'}\n".encode())

    def metrics(self, who: Identity, accept: str) -> HttpResponse:
        """Counters and gauges for Prometheus; of all tenants, so not for each of them."""
        if not who.sees_all:
            return HttpResponse(
                HTTPStatus.FORBIDDEN, b"metrics are for the operator: ask for a token that may watch the server\n"
            )
        return HttpResponse(HTTPStatus.OK, *self.export(accept))

    def _why_not_ready(self) -> str:
        """The reason why a client that connects now is not served; empty: it is."""
        if self.context.draining.is_set():
            return "draining: no further clients are admitted"
        if not self.context.listeners:
            return "starting"
        return "" if self.context.tenants.ready else "an executor is being started"


Route = Callable[[Operations, Identity, str], HttpResponse]
ROUTES: Final[Mapping[str, Route]] = MappingProxyType(
    {"/livez": Operations.livez, "/readyz": Operations.readyz, "/metrics": Operations.metrics}
)
