"""The transports `http` and `https`: addresses, connecting, listening."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import attrs

from djinn.errors import TransportError
from djinn.hooks import Connection, Limits, Listener, TlsOptions, Transport, TransportCapabilities

# Connections are imported where there is one: each client has this transport, and few use it.
if TYPE_CHECKING:
    from djinn_http.exchange import Endpoint


class HttpTransport(Transport):
    """The transport `http`. Its addresses are `http://HOST:PORT`, and for clients behind a reverse proxy also with a path."""

    name = "http"
    schemes = ("http",)
    capabilities = TransportCapabilities(same_host=False, relayed=True, speed=20)

    def connect(self, url: str, limits: Limits, timeout: float) -> Connection:
        """Connect to a server within `timeout` seconds, as `Transport.connect`."""
        return _connect(_endpoint_of(url, None), url, limits, timeout)

    def listen(self, url: str, limits: Limits, accept: Callable[[Connection], bool | None]) -> Listener:
        """Listen at `url`, and call `accept` in a new thread for each connection, as `Transport.listen`."""
        return _listen(_endpoint_of(url, None), url, limits, accept)

    def over_tls(self, tls: TlsOptions) -> Transport:
        """Return this transport under TLS, with the scheme `https`."""
        return HttpsTransport(tls)


class HttpsTransport(Transport):
    """The transport `https`: HTTP under TLS."""

    name = "https"
    schemes = ("https",)
    capabilities = TransportCapabilities(same_host=False, relayed=True, speed=15)

    def __init__(self, tls: TlsOptions) -> None:
        self._tls = tls

    def connect(self, url: str, limits: Limits, timeout: float) -> Connection:
        """Connect to a server within `timeout` seconds, and finish the TLS handshake within `timeout` more seconds."""
        return _connect(_endpoint_of(url, self._tls), url, limits, timeout)

    def listen(self, url: str, limits: Limits, accept: Callable[[Connection], bool | None]) -> Listener:
        """Listen at `url`, and call `accept` for each connection.

        Raises:
            ConfigurationError: the certificate cannot be used.
        """
        return _listen(_endpoint_of(url, self._tls), url, limits, accept)


def _connect(endpoint: Endpoint, url: str, limits: Limits, timeout: float) -> Connection:
    from djinn_http.client import connect

    try:
        return connect(endpoint, limits, timeout, f"server {url}")
    except OSError as error:
        if isinstance(error, TransportError):
            raise
        raise TransportError(f"no server answers at {url}: {error}; is `djinn serve` running there?") from error


def _listen(endpoint: Endpoint, url: str, limits: Limits, accept: Callable[[Connection], bool | None]) -> Listener:
    # Imported here because clients and most executors never listen, and the server's library takes long to import.
    from djinn.hooks import server_context
    from djinn_http.server import HttpListener

    context = None if endpoint.tls is None else server_context(endpoint.tls)
    sock: socket.socket | None = None
    try:
        addresses = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        actual = attrs.evolve(endpoint, port=sock.getsockname()[1], prefix="")
        return HttpListener(sock, actual.url, limits, accept, context)
    except OSError as error:
        if sock is not None:
            sock.close()
        if isinstance(error, TransportError):
            raise
        raise TransportError(
            f"cannot listen at {url}: {error}. Choose another port, or port 0 for a free one"
        ) from error


def _endpoint_of(url: str, tls: TlsOptions | None) -> Endpoint:
    from djinn_http.exchange import Endpoint

    scheme, usual = ("http", 80) if tls is None else ("https", 443)
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise TransportError(f"{url!r} is not an HTTP address: {error}") from error
    if parts.scheme != scheme or not host or parts.query or parts.fragment:
        raise TransportError(f"{url!r} is not an HTTP address: write {scheme}://HOST:PORT")
    if parts.username is not None:
        raise TransportError(
            "the server's address contains a password, and addresses are logged: use the setting `token`"
        )
    return Endpoint(host, usual if port is None else port, parts.path.rstrip("/"), tls)
