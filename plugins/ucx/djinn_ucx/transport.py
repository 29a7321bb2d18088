"""The transports `ucx` and `ucxs`: connections over a `tcp://` or `tcps://` socket, with UCX for large buffers."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import attrs

from djinn.errors import TransportError
from djinn.hooks import (
    Connection,
    Limits,
    Listener,
    SocketConnection,
    TlsOptions,
    Transport,
    TransportCapabilities,
    get_logger,
)
from djinn_tcp import TcpTransport

# Imported with the first connection: every client has this transport, but few use it.
if TYPE_CHECKING:
    from djinn_ucx.connection import Shared, UcxConnection

BULK_BYTES: Final = 512 << 10  # smaller buffers are faster over the socket, which also buffers them until they are read
# `named_only`, because UCX traffic is not encrypted
_CAPABILITIES: Final = TransportCapabilities(same_host=False, relayed=False, speed=60, named_only=True)
log = get_logger("djinn.ucx")


class _OverSockets(Transport):
    """Base class of both transports: connections over the sockets of another transport.

    Attributes:
        name: name of the transport.
        schemes: URL schemes of the transport.
        capabilities: as in `Transport`.
    """

    capabilities = _CAPABILITIES

    def __init__(self, scheme: str, socket_transport: Transport, bulk_bytes: int, shared: Callable[[], Shared]) -> None:
        self.name = scheme
        self.schemes = (scheme,)
        self._socket_transport = socket_transport
        self._bulk_bytes = bulk_bytes
        self._shared = shared

    def connect(self, url: str, limits: Limits, timeout: float) -> Connection:
        """Connect to a server within `timeout` seconds, as `Transport.connect`."""
        below, limits_below = self._socket_address(url, limits)
        try:
            connection = self._socket_transport.connect(below, limits_below, timeout)
        except TransportError as error:
            raise TransportError(str(error).replace(below, url)) from error
        return self._wrap(connection, limits, url)

    def listen(self, url: str, limits: Limits, accept: Callable[[Connection], bool | None]) -> Listener:
        """Listen at `url`, and call `accept` in a new thread for each connection, as `Transport.listen`."""
        below, limits_below = self._socket_address(url, limits)

        def serve(connection: Connection) -> bool | None:
            ucx_connection, verdict = self._wrap(connection, limits, url), None
            try:
                verdict = accept(ucx_connection)
            finally:
                if not verdict:
                    ucx_connection.close()
            return verdict

        try:
            listener = self._socket_transport.listen(below, limits_below, serve)
        except TransportError as error:
            raise TransportError(str(error).replace(below, url)) from error
        log.warning("large buffers are sent over UCX without encryption: use ucxs:// in trusted networks only", url=url)
        return _UcxListener(listener.url.replace(self._socket_transport.schemes[0], self.name, 1), listener)

    def _socket_address(self, url: str, limits: Limits) -> tuple[str, Limits]:
        """Return the socket's URL and limits, after a check that UCX is available.

        Raises:
            TransportError: UCX is unavailable, or the address has another scheme.
        """
        from djinn_ucx.library import library
        from djinn_ucx.opening import socket_limits

        library()
        return self._socket_url(url), socket_limits(limits)

    def _socket_url(self, url: str) -> str:
        """Return the socket's URL, with the same host and port."""
        scheme, _, location = url.partition("://")
        if scheme != self.name:
            raise TransportError(f"{url!r} is not a UCX address: write {self.name}://HOST:PORT")
        return f"{self._socket_transport.schemes[0]}://{location}"

    def _wrap(self, connection: Connection, limits: Limits, url: str) -> UcxConnection:
        from djinn_ucx.connection import UcxConnection

        assert isinstance(connection, SocketConnection)
        connection.peer = connection.peer.replace(self._socket_url(url), url)
        return UcxConnection(connection, limits, _is_loopback(url), self._shared(), self._bulk_bytes)


class UcxTransport(_OverSockets):
    """Scheme `ucx`: frames over a plain socket."""

    def __init__(self, bulk_bytes: int = BULK_BYTES) -> None:
        """Create the transport. `bulk_bytes`: minimum bytes of a buffer that is sent over UCX, at least 64 KiB."""
        super().__init__("ucx", TcpTransport(), bulk_bytes, cache(_new_shared))

    def over_tls(self, tls: TlsOptions) -> Transport:
        """Return a transport of scheme `ucxs`, whose socket uses TLS. Buffers over UCX are not encrypted."""
        return UcxsTransport(TcpTransport().over_tls(tls), self._bulk_bytes, self._shared)

    def facts(self) -> str:
        """Return the version of UCX, and its transports on this machine."""
        from djinn_ucx.library import facts

        return facts()


class UcxsTransport(_OverSockets):
    """Scheme `ucxs`: frames over a socket under TLS."""

    def __init__(self, socket_transport: Transport, bulk_bytes: int, shared: Callable[[], Shared]) -> None:
        super().__init__("ucxs", socket_transport, bulk_bytes, shared)


def _new_shared() -> Shared:
    from djinn_ucx.connection import Shared

    return Shared()


@attrs.define
class _UcxListener(Listener):
    """Listener of the socket transport, with a URL of the UCX transport."""

    url: str
    below: Listener

    def close(self) -> None:
        """Stop accepting and release the address."""
        self.below.close()


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
