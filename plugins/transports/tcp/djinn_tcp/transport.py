"""TCP sockets: addresses, connecting, listening."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from djinn.transports import (
    Connection,
    Limits,
    Listener,
    SocketConnection,
    SocketListener,
    TransportCapabilities,
    TransportError,
)

# A peer that vanished without a word is given up after IDLE + INTERVAL * COUNT seconds.
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class TcpTransport:
    """Scheme `tcp`: `tcp://host:port`, IPv6 addresses in brackets."""

    name = "tcp"
    schemes: tuple[str, ...] = ("tcp",)
    capabilities = TransportCapabilities(zero_copy=True, same_host=False, relayed=False, speed=50)

    def connect(self, url: str, limits: Limits, timeout: float) -> Connection:
        """As `Transport.connect`. Every address of the host is tried."""
        host, port = _address_of(url)
        try:
            sock = socket.create_connection((host, port), timeout)
        except OSError as error:
            raise TransportError(
                f"no server answers at {url}: {error}; is `djinn serve` running there, and does a firewall allow port {port}?"
            ) from error
        _keep_alive(sock)
        return SocketConnection(sock, limits, f"server {url}")

    def listen(self, url: str, limits: Limits, accept: Callable[[Connection], None]) -> Listener:
        """As `Transport.listen`."""
        host, port = _address_of(url)
        sock: socket.socket | None = None
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
                0
            ]
            sock = socket.socket(family, socket.SOCK_STREAM)
            # A restarted server gets its port back at once. Connections that it accepts inherit the other options.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _keep_alive(sock)
            sock.bind(address)
            return SocketListener(sock, _url_of(host, sock.getsockname()[1]), limits, accept)
        except OSError as error:
            if sock is not None:
                sock.close()
            raise TransportError(f"cannot listen at {url}: {error}; port 0 picks a free one") from error


def _address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise TransportError(f"{url!r} is no TCP address: {error}") from error
    if parts.scheme != "tcp" or not host or port is None or parts.username is not None or parts.path not in {"", "/"}:
        raise TransportError(f"{url!r} is no TCP address; write tcp://HOST:PORT")
    return host, port


def _url_of(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in _KEEPALIVE:
        if hasattr(socket, option):  # macOS names the first of them differently
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
