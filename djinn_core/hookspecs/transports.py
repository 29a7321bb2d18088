"""`djinn_register_transports`: carry frames between a client and a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import attrs

from djinn_core.hookspecs import hookspec
from djinn_core.wire.frames import Buffer, Frame, Limits

__all__ = [
    "Buffer",
    "Connection",
    "Frame",
    "Limits",
    "LinkFacts",
    "Listener",
    "TlsOptions",
    "Transport",
    "TransportCapabilities",
    "djinn_register_transports",
]


@attrs.frozen
class TransportCapabilities:
    """Capabilities of a transport.

    Attributes:
        same_host: True if the transport only reaches servers on this machine. A server listens with it if `--transport`
            names it. The executor of a program listens with it if it is faster than `local`.
        relayed: True if the server's gateway relays its frames; False if the executor itself listens.
        speed: rank among transports: `local` has 100, `tcp` 50, `http` 20. A client first tries the transport with the
            greatest speed that both ends have.
        named_only: True if the transport is used only on request. The operator names its scheme (`--transport
            ucx=5560`), and the address that the client connects to has it (`ucx://gpu-box:5560`).
    """

    same_host: bool = False
    relayed: bool = False
    speed: int = 1
    named_only: bool = False


@attrs.frozen
class LinkFacts:
    """The operating system's measurements of the network under a connection; 0 if unknown.

    Attributes:
        latency: round-trip time in seconds.
        bandwidth: highest observed send rate of this end, in bytes per second.
    """

    latency: float = 0.0
    bandwidth: float = 0.0


NO_LINK: Final = LinkFacts()


@attrs.frozen
class TlsOptions:
    """TLS identity of one end of a connection, and the peers that it accepts.

    Attributes:
        certificate: PEM file with this end's certificate chain, or None for a client without a certificate.
        key: PEM file with the private key of `certificate`.
        authority: PEM file with the authorities that may sign the other end's certificate. If it is None, a client uses
            the machine's authorities, and a server requests no certificate.
        fingerprints: `sha256:` and the hexadecimal digest of each accepted server certificate. If there are any,
            authorities and names are not checked.
    """

    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None
    fingerprints: tuple[str, ...] = ()


class Connection(ABC):
    """A two-way, ordered, reliable stream of frames.

    `send` and `receive` may be called from different threads at the same time. The last frame of a connection may say why
    it ends. So a failed `send` ends the sending direction only: `receive` still returns the frames that the other end sent
    before it closed, and raises `TransportError` after them. Any other exception ends the session.

    The properties are facts that gateways and dashboards read from any thread; each has a default. A subclass may override
    one with an attribute that it declares in its class.

    Attributes:
        limits: maximum size of a frame, checked in both directions. The core replaces it at any time, for example by wider
            limits for an authenticated client.
    """

    limits: Limits

    @abstractmethod
    def send(self, frame: Frame) -> None:
        """Send a frame. The caller may reuse its buffers when this returns, even if the frame is still in flight.

        A frame of up to 128 KiB must not wait for a reader at the other end; a larger frame may.

        Raises:
            TransportError: the connection is broken, or another thread closed it. No further frame can be sent. The
                caller may reuse the buffers: the other end must not accept a frame whose buffers may have changed in
                flight.
        """

    @abstractmethod
    def receive(self, timeout: float | None = None) -> Frame:
        """Return the next frame. Wait at most `timeout` seconds, or forever if it is None.

        The caller owns the buffers of the frame while a view of them exists, because tensors share their memory. A
        transport may reuse the memory afterwards, for example from a pool that is registered with its device.

        Raises:
            TimeoutError: no frame arrived in time. No data is lost.
            ProtocolError: the other end violates the format or the limits. The connection is closed.
            TransportError: the connection is broken or closed.
        """

    def descriptor(self) -> int | None:
        """Return a descriptor that becomes readable when the next frame begins to arrive, or when the connection ends.

        It is called after `receive` has raised TimeoutError. None, the default, means that no such descriptor exists
        now. An idle session of a connection with a descriptor needs no thread.
        """
        return None

    def place_bodies(self, place: Callable[[bytes, int], memoryview | None]) -> None:
        """Receive a large buffer in memory that `place` returns. The default ignores `place`.

        `place` gets the head of the frame and the length of the buffer. It returns memory of that length, or None.
        """
        del place

    @abstractmethod
    def close(self) -> None:
        """Close both directions. A waiting `send` or `receive` raises `TransportError`. A second call has no effect.

        The other end still receives the frames that were sent before, even if it is sending frames that nobody reads. A
        server's end may wait a second for the other end to close, so that this holds on a lossy network. `close` also
        cancels a transfer: release its memory and descriptors within seconds.
        """

    @property
    def bytes_sent(self) -> int:
        """Bytes that this end put on the wire, framing included. Overhead of a library that does not report it may be left out."""
        return 0

    @property
    def bytes_received(self) -> int:
        """Bytes that this end took off the wire, framing included."""
        return 0

    @property
    def buffered_bytes(self) -> int:
        """Bytes in memory of incomplete frames, and of frames that `receive` has not returned.

        A gateway above its relay limit closes the connections that hold most.
        """
        return 0

    @property
    def peer(self) -> str:
        """The other end, such as `client 10.0.0.1:5000`, for the audit log; empty if it is unknown."""
        return ""

    @property
    def certificate(self) -> bytes:
        """TLS certificate of the other end in DER, for authenticators; empty if it showed none."""
        return b""

    @property
    def link(self) -> LinkFacts:
        """Measurements of the network so far. Never blocks, never raises."""
        return NO_LINK


class Listener(ABC):
    """A listening endpoint.

    Attributes:
        url: what a client passes to `connect`, with the actual port.
    """

    url: str

    @abstractmethod
    def close(self) -> None:
        """Stop accepting and release the address. Existing connections stay open. A second call has no effect."""


class Transport(ABC):
    """Carry frames between a client and a server.

    A server and its executors listen with each transport that reaches other machines, and with the transports that
    `--transport` names. A client tries the transports of both ends in order of `speed`. An exception other than
    `TransportError` fails the start of the client or the server. `djinn.hooks.SocketTransport` implements a transport
    over any kind of stream socket.

    Attributes:
        name: unique among transports.
        schemes: URL schemes of the transport, such as `("tcp",)`; unique among transports.
        capabilities: its properties. By default it reaches other machines directly, with the lowest rank.
    """

    name: str
    schemes: tuple[str, ...]
    capabilities: TransportCapabilities = TransportCapabilities()

    @abstractmethod
    def connect(self, url: str, limits: Limits, timeout: float) -> Connection:
        """Connect to a server, within `timeout` seconds.

        Raises:
            TransportError: no server answers at `url`.
        """

    @abstractmethod
    def listen(self, url: str, limits: Limits, accept: Callable[[Connection], bool | None]) -> Listener:
        """Listen at `url` (port 0: any free port) and call `accept` in a new thread for each connection.

        Close the connection when `accept` returns or raises, unless it returns True. After True, the session closes
        the connection.

        Raises:
            TransportError: the address cannot be bound.
        """

    def over_tls(self, tls: TlsOptions) -> Transport | None:
        """Return this transport under TLS, with a name and schemes of its own such as `tcps`; None if it has no TLS.

        The default is None: a server with a certificate does not listen with the transport. `connect` of the result
        raises `TransportError` if the server's certificate does not satisfy `tls`.
        """
        return None

    def facts(self) -> str:
        """Return one line for `djinn doctor`, such as the version of a library; by default an empty string.

        Must not raise.
        """
        return ""


@hookspec
def djinn_register_transports(settings: Any) -> Iterable[Transport]:
    """Return the transports that this plugin offers.

    Called once in each client, gateway and executor process, when the plugins are first needed or configured again. A server
    listens with the transports whose URL schemes are requested. A client tries the transports of both ends in order of `speed`,
    and logs a fallback. An exception disables the plugin.
    """
    del settings
    raise NotImplementedError
