"""A transport for Djinn: send frames over TCP sockets of this machine, with its own URL scheme."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from djinn.hooks import SocketTransport, Transport, hookimpl

djinn_api_version = "2.0"


class ExampleTransport(SocketTransport):
    """Scheme `djinn-example`, as in `djinn-example://127.0.0.1:5556`. Port 0 listens at any free port."""

    name = "example"
    schemes = ("djinn-example",)

    def dial(self, url: str, timeout: float) -> socket.socket:
        """Return a connected socket. An `OSError` means that no server answers."""
        return socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout)

    def bind(self, url: str) -> tuple[socket.socket, str]:
        """Return a bound socket, and the URL at which clients reach it."""
        sock = socket.create_server(("127.0.0.1", urlsplit(url).port or 0))
        return sock, f"djinn-example://127.0.0.1:{sock.getsockname()[1]}"


@hookimpl
def djinn_register_transports() -> list[Transport]:
    """Return the transports of this plugin."""
    return [ExampleTransport()]
