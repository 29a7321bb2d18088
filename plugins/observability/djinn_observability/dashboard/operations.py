"""The plugin `operations`: the operations server of a gateway, and the local server of `djinn dashboard`."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from djinn.hooks import Credentials, Denial, Identity, OperationsAddress, OperationsServer, WatchedServer, hookimpl
from djinn_observability.dashboard.listener import OperationsListener
from djinn_observability.dashboard.metrics import MetricsPage
from djinn_observability.dashboard.pages import Dashboard
from djinn_observability.dashboard.routes import DASHBOARD, LIVE, METRICS, READY, Operations

djinn_api_version = "2.0"
_OPERATOR = "default"  # tenant of an identity that sees all


class DjinnOperations(OperationsServer):
    """Operations server with probes, metrics if the server has any, and the dashboard."""

    name = "djinn"
    routes = (LIVE, READY, METRICS, DASHBOARD)

    def start(self, server: WatchedServer, address: OperationsAddress) -> str:
        """Listen, as `OperationsServer.start`."""
        export = MetricsPage(server.metrics).export if server.metrics is not None else None
        self._dashboard = Dashboard(server)
        try:
            routes = Operations(server, self._dashboard, export, address.open_probes)
            self._listener = OperationsListener(address, routes)
        except BaseException:
            self._dashboard.close()
            raise
        return self._listener.url

    def close(self) -> None:
        """Stop listening, as `OperationsServer.close`."""
        self._dashboard.close()
        self._listener.close()


def identify_by(code: str) -> Callable[[Credentials, str], Identity | Denial]:
    """Return a `WatchedServer.identify` that accepts only the token `code`, which the command prints for this user."""

    def identify(credentials: Credentials, _: str) -> Identity | Denial:
        if hmac.compare_digest(credentials.token.encode(errors="replace"), code.encode()):
            return Identity(_OPERATOR)
        return Denial(f"the page is at {DASHBOARD}; this needs the code that the command printed")

    return identify


@hookimpl
def djinn_register_operations() -> list[OperationsServer]:
    """Register the operations server."""
    return [DjinnOperations()]
