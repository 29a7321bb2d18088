"""Addresses, connecting, listening."""

from __future__ import annotations

import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from djinn.transports import Connection, Limits, Listener, TransportCapabilities, TransportError
from djinn_http.client import HttpConnection
from djinn_http.exchange import Endpoint


class HttpTransport:
    """Scheme `http`: `http://host:port`, and for clients a path that a reverse proxy maps to the server."""

    name = "http"
    schemes: tuple[str, ...] = ("http",)
    capabilities = TransportCapabilities(zero_copy=False, same_host=False, relayed=True, speed=20)

    def connect(self, url: str, limits: Limits, timeout: float) -> Connection:
        """As `Transport.connect`."""
        try:
            return HttpConnection(_endpoint_of(url), limits, timeout, f"server {url}")
        except OSError as error:
            if isinstance(error, TransportError):
                raise
            raise TransportError(f"no server answers at {url}: {error}; is `djinn serve` running there?") from error

    def listen(self, url: str, limits: Limits, accept: Callable[[Connection], None]) -> Listener:
        """As `Transport.listen`."""
        # Imported here because clients and most executors never listen, and the server's library takes long to import.
        from djinn_http.server import HttpListener

        endpoint = _endpoint_of(url)
        sock: socket.socket | None = None
        try:
            found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            actual = Endpoint(endpoint.host, sock.getsockname()[1], "")
            return HttpListener(sock, f"http://{actual.authority}", limits, accept)
        except OSError as error:
            if sock is not None:
                sock.close()
            if isinstance(error, TransportError):
                raise
            raise TransportError(f"cannot listen at {url}: {error}; port 0 picks a free one") from error


def _endpoint_of(url: str) -> Endpoint:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise TransportError(f"{url!r} is no HTTP address: {error}") from error
    if parts.scheme != "http" or not host or parts.query or parts.fragment:
        raise TransportError(f"{url!r} is no HTTP address; write http://HOST:PORT")
    if parts.username is not None:
        raise TransportError("a password does not belong in a URL, which ends up in logs; give the token as a setting")
    return Endpoint(host, 80 if port is None else port, parts.path.rstrip("/"))
