"""HTTP listener for operators: liveness (`/livez`), readiness (`/readyz`) and Prometheus metrics (`/metrics`).

Every route requires a token: `Authorization: Bearer TOKEN`. `djinn token create NAME --monitor` makes one that is good for
nothing else.
"""

from __future__ import annotations

import random
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, Final

import attrs

from djinn_core.builtins.sockets import Cut
from djinn_core.builtins.unauthenticated_limit import Strangers
from djinn_core.errors import TransportError
from djinn_core.launch.addresses import network_location
from djinn_core.launch.http_hosts import is_called, own_names
from djinn_core.logs import get_logger
from djinn_core.server.gateway.admission import REFUSAL_SECONDS, Counts
from djinn_core.server.gateway.audit import Audit
from djinn_core.server.gateway.authenticator import Authenticator, Denied, Identity

REQUEST_SECONDS: Final = 5.0  # for a whole request, the handshake of TLS included
_MOST: Final = 64  # connections at a time
_HEAD_BYTES: Final = 16 << 10  # of a request: its line and headers
_log = get_logger("djinn.server")


@attrs.frozen
class Answer:
    """An HTTP response of a route."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


@attrs.frozen
class Operations:
    """The routes and the state that they report.

    Attributes:
        ready: returns the reason why a client that connects now is not served, empty where it is.
        export: the metrics and their content type, for an `Accept` header.
    """

    gatekeeper: Authenticator
    audit: Audit
    counts: Counts
    ready: Callable[[], str]
    export: Callable[[str], tuple[bytes, str]]

    def livez(self, who: Identity, accept: str) -> Answer:
        """Liveness: a process that does not answer should be restarted."""
        del who, accept
        return Answer(HTTPStatus.OK, b"ok\n")

    def readyz(self, who: Identity, accept: str) -> Answer:
        """Readiness: while it fails, clients should be sent elsewhere."""
        del who, accept
        reason = self.ready()
        return Answer(HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK, f"{reason or 'ok'}\n".encode())

    def metrics(self, who: Identity, accept: str) -> Answer:
        """Counters and gauges for Prometheus; of all tenants, so not for each of them."""
        if not who.sees_all:
            return Answer(
                HTTPStatus.FORBIDDEN, b"metrics are for the operator: ask for a token that may watch the server\n"
            )
        return Answer(HTTPStatus.OK, *self.export(accept))


Route = Callable[[Operations, Identity, str], Answer]
ROUTES: Final[Mapping[str, Route]] = MappingProxyType(
    {"/livez": Operations.livez, "/readyz": Operations.readyz, "/metrics": Operations.metrics}
)


class OperationsListener:
    """An HTTP server for `ROUTES`.

    Attributes:
        url: where it listens.
    """

    def __init__(self, host: str, port: int, operations: Operations, context: ssl.SSLContext | None = None) -> None:
        """Listen, under TLS where there is a context.

        Raises:
            TransportError: the address cannot be bound.
        """
        try:
            self._server = _server_at(host, port)
        except OSError as error:
            raise TransportError(f"cannot listen for operations at {network_location(host, port)}: {error}") from error
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://{network_location(host, self._server.server_address[1])}"
        self._server.operations, self._server.context = operations, context
        self._server.names = own_names(self.url)
        threading.Thread(target=self._server.serve_forever, name="djinn-operations", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = _MOST
    operations: Operations
    context: ssl.SSLContext | None = None
    names: frozenset[str] = frozenset()

    def __init__(self, address: tuple[str, int]) -> None:
        self.strangers = Strangers(_MOST)
        super().__init__(address, _Handler)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One connection, in a thread of its own, with a limit on how long it may take in all."""
        try:
            with self._limited(self._secured(request)) as secure:
                if isinstance(secure, ssl.SSLSocket):
                    secure.do_handshake()
                super().process_request_thread(secure, client_address)
        except OSError as error:
            _log.info("a connection for operations did not come about", peer=str(client_address), error=str(error))
            request.close()

    def _secured(self, request: socket.socket) -> socket.socket:
        """Under TLS where there is any; the handshake, which has to be within the limit, is still to come."""
        if self.context is None:
            return request
        return self.context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)

    @contextmanager
    def _limited(self, secure: socket.socket) -> Iterator[socket.socket]:
        """It is cut off when its time is over, or where there are too many."""
        cut = Cut(secure)
        timer = threading.Timer(REQUEST_SECONDS, cut.close)
        timer.daemon = True
        timer.start()
        try:
            with self.strangers.entered(cut):
                yield secure
        finally:
            timer.cancel()
            secure.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a request whose client hung up or took too long."""
        del request
        _log.info("a request for operations broke off", peer=str(client_address), error=repr(sys.exception()))


class _Server6(_Server):
    address_family = socket.AF_INET6


def _server_at(host: str, port: int) -> _Server:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return (_Server6 if family == socket.AF_INET6 else _Server)((str(address[0]), int(address[1])))


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "djinn"
    sys_version = ""
    protocol_version = "HTTP/1.0"  # one request a connection

    def setup(self) -> None:
        """As the base class, which would read several megabytes of headers."""
        super().setup()
        self.rfile = _Bounded(self.rfile)  # type: ignore[assignment] # only lines are read

    def do_GET(self) -> None:
        """A request."""
        answer = self._answer()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        if answer.status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class calls it so
        """Nothing: refusals are in the audit log, and probes come every few seconds."""

    def _answer(self) -> Answer:
        operations = self.server.operations
        hosts = self.headers.get_all("Host", [])
        if "Origin" in self.headers or "Sec-Fetch-Site" in self.headers:
            return Answer(HTTPStatus.FORBIDDEN, b"this server does not talk to web pages\n")
        if len(hosts) != 1 or not is_called(hosts[0], self.server.names):
            return Answer(HTTPStatus.MISDIRECTED_REQUEST, b"the Host header is missing, or names another server\n")
        who = operations.gatekeeper.identify(_bearer(self.headers.get("Authorization", "")))
        path = self.path.partition("?")[0]
        if isinstance(who, Denied):
            operations.counts.refused[f"operations_{who.kind}"] += 1
            operations.audit.note("refused", why=who.kind, asked=path[:64], peer=str(self.client_address[0]))
            time.sleep(random.uniform(*REFUSAL_SECONDS))  # noqa: S311 - not for secrecy
            return Answer(HTTPStatus.UNAUTHORIZED, f"{who.reason}\n".encode())
        route = ROUTES.get(path)
        if route is None:
            return Answer(HTTPStatus.NOT_FOUND, f"there are {', '.join(ROUTES)}\n".encode())
        return route(operations, who, self.headers.get("Accept", ""))


class _Bounded:
    """The lines of a request, up to `_HEAD_BYTES` together."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = _HEAD_BYTES

    def readline(self, limit: int) -> bytes:
        """The next one.

        Raises:
            LineTooLong: there was too much.
        """
        line: bytes = self._file.readline(min(limit, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("header")
        return line

    @property
    def closed(self) -> bool:
        """As of a file."""
        return bool(self._file.closed)

    def close(self) -> None:
        """As of a file."""
        self._file.close()


def _bearer(authorization: str) -> str:
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
