"""Executors among themselves: who may bring values to a session, and what is on its way.

A client that uses several executors asks one for a ticket (`Invite`) and hands it to another (`Meet`), which connects and
shows it (`Join`). From then on values travel on that connection in one direction, sent by a thread of their own, so that
neither executor waits for the link before it has to.
"""

from __future__ import annotations

import hashlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import attrs

from djinn_core.builtins.tls_contexts import fingerprint_of_file
from djinn_core.errors import DjinnError, ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection, Frame, Limits, TlsOptions, Transport
from djinn_core.launch.addresses import has_transport, transport_for
from djinn_core.launch.securing import with_tls
from djinn_core.logs import get_logger
from djinn_core.server.cargo import Packed, room_for
from djinn_core.server.gauging import WORTH, Sightings, measure
from djinn_core.wire.messages import decode, encode, expect
from djinn_core.wire.peer_messages import Cargo, Invited, Join, Joined, LinkSeen, Meet, Met, Parcel, Probe

JOIN_SECONDS = 60.0  # for which a ticket is good
DIAL_SECONDS = 5.0
PARCEL = 4 << 20  # bytes
WAITING_LIMIT = 64  # shipments that wait for a link, before the executor waits for it, too
_log = get_logger("djinn.server")


class Inbox:
    """What other executors have brought to a session, by shipment."""

    def __init__(self, sightings: Sightings | None = None) -> None:
        self._sightings = sightings or Sightings()
        self._arrived: dict[int, list[Packed]] = {}
        self._lost: dict[int, str] = {}
        self._changed = threading.Condition()

    def put(self, shipment: int, items: list[Packed]) -> None:
        """A shipment has arrived whole."""
        with self._changed:
            self._arrived[shipment] = items
            self._changed.notify_all()

    def unload(self, cargo: Cargo, receive: Callable[[], Frame], source: int = 0) -> None:
        """Take in a shipment that has begun to arrive; `receive` gives the frames after its first.

        `source`: the executor that it comes from, where it comes from there directly.

        Raises:
            TransportError: the connection has ended.
            ProtocolError: what comes is not what was announced.
        """
        buffers = [room_for(item) for item in cargo.items]
        began = time.perf_counter()
        for buffer in buffers:
            _fill(buffer, receive)
        if source:
            self._sightings.arrived(source, sum(map(len, buffers)), time.perf_counter() - began)
        self.put(cargo.shipment, list(zip(cargo.items, buffers, strict=True)))

    def lose(self, source: int, reason: str) -> None:
        """Nothing will come from executor `source` any more."""
        with self._changed:
            self._lost[source] = reason
            self._changed.notify_all()

    def take(self, shipment: int, source: int) -> list[Packed] | str:
        """Wait for a shipment; or why it will not come."""
        with self._changed:
            self._changed.wait_for(lambda: shipment in self._arrived or source in self._lost)
            found = self._arrived.pop(shipment, None)
            return found if found is not None else self._lost[source]


@attrs.frozen
class Guest:
    """Another executor that showed a good ticket: it may bring values to `inbox`, as number `source`."""

    inbox: Inbox
    source: int

    def serve(self, connection: Connection) -> None:
        """Take what it brings until the connection ends.

        Raises:
            TransportError: it has ended.
            ProtocolError: what came is no shipment.
        """
        reason = "the executor that it was on hung up"
        try:
            connection.limits = Limits()
            connection.send(Frame(encode(Joined())))
            while True:
                self._take(connection)
        except (TransportError, ProtocolError) as error:
            reason = str(error)
            raise
        finally:
            self.inbox.lose(self.source, reason)

    def _take(self, connection: Connection) -> None:
        message = decode(connection.receive().head)
        if isinstance(message, Probe):
            connection.send(Frame(encode(Probe())))
        elif isinstance(message, Cargo):
            self.inbox.unload(message, connection.receive, self.source)
        else:
            raise ProtocolError(f"an executor does not bring a {type(message).__name__}")


def _fill(buffer: memoryview, receive: Callable[[], Frame]) -> None:
    filled = 0
    while filled < len(buffer):
        frame = receive()
        expect(frame.head, Parcel)
        for part in frame.body:
            octets = memoryview(part)
            if filled + octets.nbytes > len(buffer):
                raise ProtocolError("a shipment brings more bytes than it announced")
            buffer[filled : filled + octets.nbytes] = octets
            filled += octets.nbytes


class Harbour:
    """Where an executor process lets other executors in; shared by its sessions."""

    def __init__(self, transports: Iterable[Transport] = (), tls: TlsOptions | None = None) -> None:
        """`tls`: the certificate that this executor shows, where it listens under TLS."""
        self._transports = tuple(transports)
        self._tls = tls or TlsOptions()
        self._fingerprint = fingerprint_of_file(tls.certificate) if tls and tls.certificate else ""
        self.urls: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._open: dict[bytes, tuple[Guest, float]] = {}

    def invite(self, inbox: Inbox, source: int) -> Invited:
        """A ticket for executor `source`, good once and for a minute."""
        ticket, now = secrets.token_urlsafe(32), time.monotonic()
        with self._lock:
            self._open = {key: entry for key, entry in self._open.items() if entry[1] > now}
            self._open[_key(ticket)] = (Guest(inbox, source), now + JOIN_SECONDS)
        return Invited(ticket, self.urls, self._fingerprint)

    def ways_to(self, fingerprint: str) -> tuple[Transport, ...]:
        """The transports to another executor, which shows the certificate of that fingerprint if it speaks TLS."""
        if not fingerprint:
            return self._transports
        return with_tls(self._transports, attrs.evolve(self._tls, authority=None, fingerprints=(fingerprint,)))

    def redeem(self, ticket: str) -> Guest | None:
        """Who may come in with this ticket; None where it is forged, used or too old."""
        with self._lock:
            guest, until = self._open.pop(_key(ticket), (None, 0.0))
        return guest if time.monotonic() < until else None


def _key(ticket: str) -> bytes:
    # Looked up by digest, so that the time it takes says nothing about the ticket.
    return hashlib.sha256(ticket.encode()).digest()


class Route:
    """The way to another executor, and the thread that sends on it."""

    def __init__(self, connection: Connection, peer: int, sightings: Sightings) -> None:
        self._connection = connection
        self._peer, self._sightings = peer, sightings
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING_LIMIT)
        self._broken = ""
        self._probed = connection.bytes_sent
        self._sender = threading.Thread(target=self._send_all, name="djinn-route", daemon=True)
        self._sender.start()

    @property
    def bytes_sent(self) -> int:
        """Bytes that went this way, but for those that measured it."""
        return self._connection.bytes_sent - self._probed

    def send(self, shipment: int, items: list[Packed]) -> None:
        """Have a shipment sent; waits while too many are before it."""
        self._waiting.put(partial(self._send, shipment, items))

    def gauge(self) -> None:
        """Have the way measured, unless something is on it: then the receiver sees how long that takes."""
        if self._waiting.empty():
            self._waiting.put(self._measure)

    def close(self) -> None:
        """Send what waits, then hang up."""
        self._waiting.put(None)
        self._sender.join(DIAL_SECONDS)
        self._connection.close()

    def _send_all(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            if not self._broken:
                try:
                    waiting()
                except (DjinnError, TimeoutError) as error:
                    self._broken = str(error)  # whoever expects what does not arrive notices that the connection ended
                    _log.warning("the way to another executor is lost", error=self._broken)
                    self._connection.close()

    def _send(self, shipment: int, items: Sequence[Packed]) -> None:
        for frame in frames_of(shipment, items):
            self._connection.send(frame)

    def _measure(self) -> None:
        before = self._connection.bytes_sent
        latency, bandwidth = measure(self._connection)
        self._probed += self._connection.bytes_sent - before
        self._sightings.note(LinkSeen(self._peer, False, WORTH, WORTH / bandwidth, latency))


def frames_of(shipment: int, items: Sequence[Packed]) -> Iterator[Frame]:
    """A shipment as it travels."""
    yield Frame(encode(Cargo(shipment, tuple(item for item, _ in items))))
    for _, data in items:
        for start in range(0, len(data), PARCEL):
            yield Frame(encode(Parcel()), [data[start : start + PARCEL]])


class Exchange:
    """What a session has to do with other executors."""

    def __init__(self, harbour: Harbour) -> None:
        self.sightings = Sightings()
        self.inbox = Inbox(self.sightings)
        self.number = 0
        self._harbour = harbour
        self._routes: dict[int, Route] = {}

    def invite(self, source: int) -> Invited:
        """Let executor `source` of the pool come to this session."""
        return self._harbour.invite(self.inbox, source)

    def meet(self, meet: Meet) -> Met:
        """Connect to another executor; the answer says why there is no connection, where there is none."""
        self.number = meet.me
        reasons: list[str] = []
        ways = self._harbour.ways_to(meet.fingerprint)
        for url in meet.urls:
            if not has_transport(url, ways):
                reasons.append(f"{url}: no transport")
                continue
            try:
                connection = transport_for(url, ways).connect(url, Limits(), DIAL_SECONDS)
                latency, bandwidth = _join(connection, meet.ticket)
            except (DjinnError, TimeoutError) as error:
                reasons.append(f"{url}: {error}")
                continue
            self._routes[meet.peer] = Route(connection, meet.peer, self.sightings)
            return Met(meet.peer, url, latency, bandwidth)
        return Met(meet.peer, error="; ".join(reasons) or "it listens nowhere")

    def send(self, shipment: int, peer: int, items: list[Packed]) -> None:
        """Send a shipment on its way.

        Raises:
            ProtocolError: there is no way to that executor.
        """
        if peer not in self._routes:
            raise ProtocolError(f"there is no way to executor {peer}")
        self._routes[peer].send(shipment, items)

    def gauge(self, peer: int) -> None:
        """Measure the way to an executor, where there is one and nothing is on it."""
        if peer in self._routes:
            self._routes[peer].gauge()

    @property
    def bytes_sent(self) -> int:
        """Bytes that went from this session to other executors."""
        return sum(route.bytes_sent for route in self._routes.values())

    def close(self) -> None:
        """Hang up on all others."""
        while self._routes:
            self._routes.popitem()[1].close()


def _join(connection: Connection, ticket: str) -> tuple[float, float]:
    """Show the ticket; the link's latency in seconds and bandwidth in bytes a second."""
    try:
        connection.send(Frame(encode(Join(ticket))))
        expect(connection.receive(DIAL_SECONDS).head, Joined)
        return measure(connection)
    except BaseException:
        connection.close()
        raise
