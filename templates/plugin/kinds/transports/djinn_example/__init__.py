"""A transport for Djinn: frames over plain TCP sockets of this machine, under a URL scheme of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from djinn.hooks import hookimpl
from djinn.transports import (
    Connection,
    Limits,
    Listener,
    SocketConnection,
    SocketListener,
    Transport,
    TransportCapabilities,
    TransportError,
)

djinn_api_version = "2.0"


class ExampleTransport:
    """Scheme `djinn-example`: `djinn-example://127.0.0.1:5556`; port 0 listens at any free one."""

    name = "example"
    schemes: tuple[str, ...] = ("djinn-example",)
    # Slower than what comes with Djinn, so that it is used only where a URL names it.
    capabilities = TransportCapabilities(zero_copy=True, same_host=True, relayed=False, speed=1)

    def connect(self, url: str, limits: Limits, timeout: float) -> Connection:
        """Connect to a server, within `timeout` seconds."""
        try:
            sock = socket.create_connection(_address(url), timeout)
        except OSError as error:
            raise TransportError(f"no server answers at {url}: {error}") from error
        return SocketConnection(sock, limits, f"server {url}")

    def listen(self, url: str, limits: Limits, accept: Callable[[Connection], None]) -> Listener:
        """Listen at `url` and call `accept` in a thread of its own for each connection."""
        try:
            sock = socket.create_server(_address(url))
        except OSError as error:
            raise TransportError(f"cannot listen at {url}: {error}") from error
        host, port = sock.getsockname()[:2]
        return SocketListener(sock, f"djinn-example://{host}:{port}", limits, accept)


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.hostname not in {"127.0.0.1", "localhost"} or parts.port is None:
        raise TransportError(f"{url!r} is not of the form djinn-example://127.0.0.1:PORT")
    return "127.0.0.1", parts.port


@hookimpl
def djinn_register_transports() -> list[Transport]:
    """The transports that this plugin offers."""
    return [ExampleTransport()]
