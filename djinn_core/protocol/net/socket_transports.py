"""Base of transports over stream sockets: a subclass opens the sockets, and this module builds connections over them."""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Callable

from djinn_core.errors import TransportError
from djinn_core.hookspecs.transports import Connection, Limits, Listener, Transport
from djinn_core.protocol.net.sockets import SocketConnection, SocketListener


class SocketTransport(Transport):
    """A transport over any kind of stream socket.

    An `OSError` of `dial` or `bind` becomes a `TransportError` that names the URL. Their `TransportError`s propagate
    unchanged.
    """

    @abstractmethod
    def dial(self, url: str, timeout: float) -> socket.socket:
        """Return a connected stream socket, within `timeout` seconds."""

    @abstractmethod
    def bind(self, url: str) -> tuple[socket.socket, str]:
        """Return a bound stream socket, which may not listen yet, and its URL for clients.

        The URL is `SCHEME://HOST:PORT` with the actual port, or `SCHEME:///PATH` if only programs on this host reach
        it.
        """

    def connect(self, url: str, limits: Limits, timeout: float) -> Connection:
        """Connect to a server, within `timeout` seconds."""
        try:
            sock = self.dial(url, timeout)
        except TransportError:
            raise
        except OSError as error:
            raise TransportError(f"no server answers at {url}: {error}; is `djinn serve` running there?") from error
        return SocketConnection(sock, limits, f"server {url}")

    def listen(self, url: str, limits: Limits, accept: Callable[[Connection], bool | None]) -> Listener:
        """Listen at `url`, and call `accept` in a new thread for each connection.

        An override, such as one that passes a `release` to `SocketListener`, must itself convert `OSError` of `bind` to
        `TransportError`.
        """
        try:
            sock, actual = self.bind(url)
        except TransportError:
            raise
        except OSError as error:
            raise TransportError(f"cannot listen at {url}: {error}") from error
        return SocketListener(sock, actual, limits, accept)
