"""Transports move frames between a client and a server, and know nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import attrs

from djinn_core.hookspecs import hookspec
from djinn_core.wire.frames import Buffer, Frame, Limits

__all__ = [
    "Buffer",
    "Connection",
    "Described",
    "Frame",
    "Limits",
    "LinkFacts",
    "LinkMeasured",
    "Listener",
    "PeerCertified",
    "PeerNamed",
    "SecurableTransport",
    "TlsOptions",
    "Transport",
    "TransportCapabilities",
    "djinn_register_transports",
]


@attrs.frozen
class TransportCapabilities:
    """Capabilities of a transport.

    Attributes:
        zero_copy: buffers are sent from and received into tensor memory.
        same_host: it only reaches servers on this machine.
        relayed: the server's gateway passes its frames on; False if the executor listens itself.
        speed: rank among transports; the fastest that both ends have is tried first.
        named_only: it is used where its scheme is named and nowhere else, however fast it is: by the operator
            (`--transport ucx=5560`) and in the address that a client was given (`ucx://gpu-box:5560`).
    """

    zero_copy: bool
    same_host: bool
    relayed: bool
    speed: int
    named_only: bool = False


@runtime_checkable
class Connection(Protocol):
    """A two-way, ordered, reliable stream of frames. `send` and `receive` may be called from different threads.

    A connection's last frame may be the one that says why it ends. So a `send` that fails ends the sending direction only:
    `receive` still gives what the other end sent before it closed, and raises `TransportError` after that.

    Attributes:
        limits: what a frame may weigh, checked in both directions. May be replaced at any time, say by wider ones once
            the other end is trusted.
        bytes_sent, bytes_received: bytes that this end has put on and taken off the wire, framing included.
    """

    limits: Limits

    @property
    def bytes_sent(self) -> int:
        """Bytes put on the wire; what a library adds that does not say how much may be left out."""

    @property
    def bytes_received(self) -> int:
        """Bytes taken off the wire."""

    def send(self, frame: Frame) -> None:
        """Send a frame; it may still be under way when this returns, but its buffers are the caller's again.

        Frames of 128 KiB together must not wait for a reader at the other end; those that are larger may.

        Raises:
            TransportError: the connection is broken, or was closed by another thread meanwhile; from now on no frame can be
                sent. Then, too, the buffers are the caller's again: the other end must not take a frame for whole whose
                buffers may have changed before they were sent.
        """

    def receive(self, timeout: float | None = None) -> Frame:
        """The next frame, waiting at most `timeout` seconds (None: for ever).

        Its buffers are the caller's as long as a view of them exists: tensors are made of them. A transport may use their
        memory again afterwards, so it may keep a pool of memory that it has registered with its device.

        Raises:
            TimeoutError: nothing came in time; nothing is lost.
            ProtocolError: the other end does not follow the format or exceeds the limits; the connection is closed.
            TransportError: the connection is broken or closed.
        """

    def close(self) -> None:
        """Close both directions; a `send` or `receive` that waits raises `TransportError`. Closing twice is fine.

        This is how a transfer is cancelled. What it took (memory, descriptors) must be given back some seconds later.

        What was sent before still arrives, also where frames of the other end are under way that are not read any more.
        A server's end may wait a second for the other one to close too, so that this holds on a lossy network.
        """


@runtime_checkable
class Holding(Protocol):
    """Optional members of a connection: gateways that pass on more than they may hold end the connections that hold most."""

    @property
    def held(self) -> int:
        """Bytes in memory of frames that are not whole yet, or that `receive` has not given out. Any thread may ask."""


@runtime_checkable
class PeerNamed(Protocol):
    """Optional member of a connection, with which gateways name the other end in the audit log.

    Attributes:
        peer: the other end, such as `client 10.0.0.1:5000`.
    """

    peer: str


@runtime_checkable
class PeerCertified(Protocol):
    """Optional member of a connection, with which gateways ask authenticators about the other end's certificate."""

    @property
    def certificate(self) -> bytes:
        """TLS certificate of the other end, in DER; empty if it showed none."""


@attrs.frozen
class LinkFacts:
    """Facts about the network under a connection, as the system measured them; 0 where it does not tell.

    Attributes:
        latency: seconds there and back.
        bandwidth: bytes a second that this end was seen to send, at most.
    """

    latency: float = 0.0
    bandwidth: float = 0.0


NO_LINK: Final = LinkFacts()


@runtime_checkable
class LinkMeasured(Protocol):
    """Optional member of a connection, with which dashboards show its network."""

    @property
    def link(self) -> LinkFacts:
        """Facts that the system measured so far; never blocks, never raises."""


def link_of(connection: object) -> LinkFacts:
    """Facts about the network under a connection; of one that does not tell, none."""
    return connection.link if isinstance(connection, LinkMeasured) else NO_LINK


@runtime_checkable
class Described(Protocol):
    """Optional member of a transport, with which `djinn doctor` shows what it has found on this machine."""

    def facts(self) -> str:
        """One line, such as a library's version and what it was built with; raises nothing."""


@runtime_checkable
class Listener(Protocol):
    """A listening endpoint. `url` is what a client passes to `connect`, with the actual port."""

    url: str

    def close(self) -> None:
        """Stop accepting and release the address; connections that exist stay open."""


@runtime_checkable
class Transport(Protocol):
    """Moves frames.

    Attributes:
        name: unique among transports.
        schemes: URL schemes that it serves, such as `("tcp",)`; unique among transports.
        capabilities: what it can do.
    """

    name: str
    schemes: tuple[str, ...]
    capabilities: TransportCapabilities

    def connect(self, url: str, limits: Limits, timeout: float) -> Connection:
        """Connect to a server, within `timeout` seconds.

        Raises:
            TransportError: no server answers at `url`.
        """

    def listen(self, url: str, limits: Limits, accept: Callable[[Connection], None]) -> Listener:
        """Listen at `url` (port 0: any free one) and call `accept` in a thread of its own for each connection.

        The connection is closed when `accept` returns or raises.

        Raises:
            TransportError: the address cannot be bound.
        """


@attrs.frozen
class TlsOptions:
    """TLS identity of one end of a connection, and the peers that it accepts.

    Attributes:
        certificate, key: PEM files with this end's certificate (and those that lead to its authority) and its key; None
            for a client that has none.
        authority: PEM file with those whose signature the other end's certificate must bear. None: a client takes the
            machine's authorities, a server asks for no certificate.
        fingerprints: `sha256:` and the digest in hexadecimal of the certificates that a server may show; where there are
            some, neither authorities nor names count.
    """

    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None
    fingerprints: tuple[str, ...] = ()


@runtime_checkable
class SecurableTransport(Protocol):
    """Optional extension of `Transport`: one that can move its frames under TLS."""

    def secured(self, tls: TlsOptions) -> Transport:
        """The same transport under TLS, with a name and schemes of its own, such as `tcps`.

        `connect` raises `TransportError` where the server's certificate is not what `tls` asks for.
        """


@hookspec
def djinn_register_transports(settings: Any) -> Iterable[Transport]:
    """Return the transports that this plugin offers.

    Called once in each client, gateway and executor process, when the plugins are first needed or configured again. A
    server listens with every transport that it is asked for by URL scheme; a client tries those that both ends have, in
    order of `speed`, and says so when it falls back. An exception disables the plugin. Since API version 1.
    """
    del settings
    raise NotImplementedError
