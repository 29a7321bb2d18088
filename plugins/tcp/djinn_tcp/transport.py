"""TCP sockets: addresses, connecting, listening."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from djinn.errors import TransportError
from djinn.hooks import (
    Connection,
    Limits,
    Listener,
    SocketConnection,
    SocketListener,
    SocketTransport,
    TlsOptions,
    Transport,
    TransportCapabilities,
)
from djinn_core.system.tcp import keep_alive

if TYPE_CHECKING:
    from djinn_core.protocol.net.tls_sockets import TlsSocket

# Seconds for a client's TLS handshake, a part of the time in which it must send its token.
_HANDSHAKE_SECONDS: Final = 5.0


class TcpTransport(SocketTransport):
    """The transport `tcp`. Its URLs are `tcp://HOST:PORT`, with IPv6 addresses in brackets."""

    name = "tcp"
    schemes = ("tcp",)
    capabilities = TransportCapabilities(same_host=False, relayed=False, speed=50)

    def dial(self, url: str, timeout: float) -> socket.socket:
        """Return a connected socket, after trying every address of the host. `timeout`: seconds for each address.

        Raises:
            TransportError: no server answers.
        """
        return _dial(url, *_address_of(url, "tcp"), timeout)

    def bind(self, url: str) -> tuple[socket.socket, str]:
        """Return a listening socket, and its URL for clients with the actual port.

        Raises:
            TransportError: the address cannot be bound.
        """
        return _bind(url, "tcp")

    def over_tls(self, tls: TlsOptions) -> Transport:
        """Return this transport under TLS, with the scheme `tcps`."""
        return TcpsTransport(tls)


class TcpsTransport(Transport):
    """The transport `tcps`: TCP with TLS. Its URLs are `tcps://HOST:PORT`."""

    name = "tcps"
    schemes = ("tcps",)
    capabilities = TransportCapabilities(same_host=False, relayed=False, speed=45)

    def __init__(self, tls: TlsOptions) -> None:
        self._tls = tls

    def connect(self, url: str, limits: Limits, timeout: float) -> Connection:
        """Connect to a server within `timeout` seconds, and finish the TLS handshake within `timeout` more seconds.

        Raises:
            TransportError: no server answers, or the handshake fails.
        """
        from djinn_core.protocol.net.tls_sockets import TlsConnection, dial_tls

        host, port = _address_of(url, "tcps")
        sock = _dial(url, host, port, timeout)
        return TlsConnection(dial_tls(sock, self._tls, host, timeout), limits, f"server {url}")

    def listen(self, url: str, limits: Limits, accept: Callable[[Connection], bool | None]) -> Listener:
        """Listen at `url`, and call `accept` in a new thread for each connection.

        Raises:
            ConfigurationError: no usable certificate is configured.
            TransportError: the address cannot be bound.
        """
        from djinn.hooks import server_context
        from djinn_core.protocol.net.tls_sockets import AcceptedTlsConnection

        context = server_context(self._tls)

        def welcome(sock: socket.socket, limits: Limits, peer: str) -> SocketConnection:
            return AcceptedTlsConnection(_shake_hands(sock, context), limits, peer)

        sock, actual = _bind(url, "tcps")
        return SocketListener(sock, actual, limits, accept, welcome=welcome)


def _dial(url: str, host: str, port: int, timeout: float) -> socket.socket:
    try:
        # Pass ASCII names as bytes, because Python imports the tables of IDNA for text.
        name = host.encode() if host.isascii() else host
        sock = socket.create_connection((name, port), timeout)  # type: ignore[arg-type]
    except OSError as error:
        raise TransportError(
            f"no server answers at {url}: {error}; is `djinn serve` running there, and does a firewall allow port {port}?"
        ) from error
    keep_alive(sock)
    return sock


def _bind(url: str, scheme: str) -> tuple[socket.socket, str]:
    """Return a socket bound to the address in `url`, and its URL with the actual port."""
    host, port = _address_of(url, scheme)
    sock: socket.socket | None = None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        # With SO_REUSEADDR, a restarted server gets its port back at once. Accepted connections inherit the keep-alive options.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keep_alive(sock)
        sock.bind(address)
        # Listen at once, so that a port in use is detected before any executor starts.
        sock.listen()
    except OSError as error:
        if sock is not None:
            sock.close()
        raise TransportError(
            f"cannot listen at {url}: {error}. Choose another port, or port 0 for a free one"
        ) from error
    return sock, _url_of(scheme, host, sock.getsockname()[1])


def _shake_hands(sock: socket.socket, context: ssl.SSLContext) -> TlsSocket:
    from djinn_core.protocol.net.tls_sockets import TlsSocket

    try:
        secure = TlsSocket(sock, context, None)
        secure.shake_hands(_HANDSHAKE_SECONDS)
    except BaseException:
        sock.close()
        raise
    return secure


def _address_of(url: str, scheme: str) -> tuple[str, int]:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise TransportError(f"{url!r} is not a TCP address: {error}") from error
    if parts.scheme != scheme or not host or port is None or parts.username is not None or parts.path not in {"", "/"}:
        raise TransportError(f"{url!r} is not a TCP address: write {scheme}://HOST:PORT")
    return host, port


def _url_of(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
