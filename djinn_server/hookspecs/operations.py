"""`djinn_register_operations`: the HTTP routes of a gateway for operators: probes, metrics and pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from djinn_core.hookspecs import hookspec
from djinn_core.hookspecs.transports import TlsOptions
from djinn_core.wire.executor_reports import ExecutorMetrics
from djinn_server.hookspecs.authenticators import Credentials, Denial, Identity


@attrs.frozen
class OperationsAddress:
    """Address at which an operations server listens.

    Attributes:
        host, port: address to listen at; port 0 is any free port.
        tls: certificate of the gateway; None: no TLS.
        open_probes: True if probes of an orchestrator need no token. They receive only an HTTP status.
    """

    host: str
    port: int = 0
    tls: TlsOptions | None = None
    open_probes: bool = False


@attrs.frozen
class ServerMetrics:
    """Metrics of a server at one moment.

    Attributes:
        gateway: metrics of the gateway's process.
        executors: metrics of each executor, by number, device and tenant.
    """

    gateway: ExecutorMetrics
    executors: Mapping[tuple[str, str, str], ExecutorMetrics]


@attrs.frozen
class WatchedServer:
    """The functions of a server that an operations server calls. Any thread may call them.

    Attributes:
        status: returns the status of a tenant, or of all tenants (None), as `djinn status --json` shows it. The call queries
            the executors. This takes milliseconds, or seconds if an executor does not answer.
        end: ends the session of this name, if the identity may end it. Returns "" on success, else an error message.
        identify: returns the identity of a client. A refusal is logged with the requested path, unless the path is empty.
        why_not_ready: returns the reason why clients are not admitted now, or "" if they are admitted.
        metrics: returns current metrics; None: the server has none.
    """

    status: Callable[[str | None], Mapping[str, Any]]
    end: Callable[[str, Identity], str]
    identify: Callable[[Credentials, str], Identity | Denial]
    why_not_ready: Callable[[], str] = lambda: ""
    metrics: Callable[[], ServerMetrics] | None = None


class OperationsServer(ABC):
    """Serve HTTP routes for operators with `djinn serve --operations-port`, in the gateway process.

    Attributes:
        name: unique among operations servers.
        routes: paths of the server, such as `/metrics`, which `djinn serve` prints.
    """

    name: str
    routes: tuple[str, ...]

    @abstractmethod
    def start(self, server: WatchedServer, address: OperationsAddress) -> str:
        """Listen, and return the URL. Called once, while the executors start.

        Raises:
            TransportError: the address cannot be bound.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop listening, and end all connections. Called once, after the last session has ended."""


@hookspec
def djinn_register_operations(settings: Any) -> Iterable[OperationsServer]:
    """Return the operations servers that this plugin offers.

    Called once in each gateway process with `--operations-port`. The gateway uses the first by name. An exception disables the plugin, and
    the gateway does not start if no other plugin serves operations. An exception in `start` ends the start of the gateway.
    """
    del settings
    raise NotImplementedError
