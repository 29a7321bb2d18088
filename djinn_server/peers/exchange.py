"""Exchange values between executors: connections, tickets and pending transfers.

If a client uses several executors, it requests a ticket from the receiver (`PeerTicketRequest`) and passes it to the
sender (`ConnectPeer`). The sender connects and shows the ticket (`PeerAttach`). Then a separate thread sends values over
this connection in one direction, so that no executor waits for the link too early. The sender stores a transfer until the
receiver has acknowledged it (`peers/route.py`). The receiver journals the transfer before that (`peers/inbox.py`). So
neither a broken connection nor the death of an executor loses a value.

A client has a control channel beside the connection of its session. After a recovery, the executor is a new process
with new addresses, and the tickets in its journal are used up. So the client connects the executors again over the
control channel, because the session itself may wait for a transfer without reading messages.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import attrs

from djinn_core.errors import ConfigurationError, DjinnError, ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection, Frame, Limits, TlsOptions, Transport
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import has_transport, is_own_socket, transport_for
from djinn_core.protocol.net.tls_contexts import fingerprint_of_file
from djinn_core.protocol.tls_transports import with_tls
from djinn_core.wire.messages import encode, expect
from djinn_core.wire.peer_messages import (
    ConnectPeer,
    ConnectPeerReply,
    PeerAttach,
    PeerAttached,
    PeerTicket,
    PeerTicketRequest,
)
from djinn_core.wire.resume_messages import Resumed
from djinn_server.handshake import complain, instance, receive_message, refuse, send_message
from djinn_server.peers.device_memory import DeviceMemory
from djinn_server.peers.inbox import PeerConnection, TransferInbox
from djinn_server.peers.link_probe import LinkMeasurements, measure
from djinn_server.peers.packed_values import Packed
from djinn_server.peers.route import Route
from djinn_server.recovery import log_records
from djinn_server.recovery.journal import Journal
from djinn_server.recovery.log_records import PoolCounts, Record
from djinn_server.session_machine import Cause, Wait

JOIN_SECONDS = 60.0  # for which a ticket is valid
DIAL_SECONDS = 5.0  # timeout of a connection attempt
_log = get_logger("djinn.server")


class PeerListener:
    """Admits other executors to an executor process. All sessions of the process share it."""

    def __init__(
        self, transports: Iterable[Transport] = (), tls: TlsOptions | None = None, patience: float = 0.0
    ) -> None:
        """`transports`: for connections to other executors. `tls`: this executor's certificate; None: no TLS.

        `patience`: seconds within which a disconnected executor may reconnect.
        """
        self._transports = tuple(transports)
        self._tls = tls or TlsOptions()
        self._fingerprint = fingerprint_of_file(tls.certificate) if tls and tls.certificate else ""
        self.patience = patience
        self.urls: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._by_ticket: dict[bytes, tuple[PeerConnection, float]] = {}
        self._by_secret: dict[bytes, PeerConnection] = {}

    def issue_ticket(self, inbox: TransferInbox, source: int) -> PeerTicket:
        """Return a ticket with which executor `source` can connect once, within `JOIN_SECONDS`."""
        ticket, now = secrets.token_urlsafe(32), time.monotonic()
        secret = secrets.token_urlsafe(32) if self.patience else ""
        with self._lock:
            self._by_ticket = {key: entry for key, entry in self._by_ticket.items() if entry[1] > now}
            self._by_ticket[_key(ticket)] = (PeerConnection(inbox, source, secret), now + JOIN_SECONDS)
        return PeerTicket(ticket, self.urls, self._current_fingerprint())

    def _current_fingerprint(self) -> str:
        """Return the fingerprint of the certificate in use, which may have been renewed."""
        if self._tls.certificate is not None:
            try:
                self._fingerprint = fingerprint_of_file(self._tls.certificate)
            except ConfigurationError as error:
                _log.warning("cannot read the certificate: the previous one stays in use", error=str(error))
        return self._fingerprint

    def transports_to(self, fingerprint: str) -> tuple[Transport, ...]:
        """Return the transports for connections to another executor.

        `fingerprint`: of the only certificate that the transports accept; empty: no TLS.
        """
        if not fingerprint:
            return self._transports
        return with_tls(self._transports, attrs.evolve(self._tls, authority=None, fingerprints=(fingerprint,)))

    def redeem(self, ticket: str) -> PeerConnection | None:
        """Return the permission of another executor. `ticket`: its ticket, or its secret if it reconnects.

        Return None if the ticket or secret is forged, used, expired or revoked.
        """
        with self._lock:
            peer_connection = self._by_secret.get(_key(ticket))
            if peer_connection is not None:
                return peer_connection
            peer, until = self._by_ticket.pop(_key(ticket), (None, 0.0))
            if peer is None or time.monotonic() >= until:
                return None
            if peer.secret:
                self._by_secret[_key(peer.secret)] = peer
            return peer

    def forget(self, inbox: TransferInbox, source: int | None = None) -> None:
        """Revoke tickets and secrets of a session. `source`: of this executor only; None: of all executors."""

        def remains(peer: PeerConnection) -> bool:
            return peer.inbox is not inbox or source not in {None, peer.source}

        with self._lock:
            self._by_ticket = {key: entry for key, entry in self._by_ticket.items() if remains(entry[0])}
            self._by_secret = {key: peer for key, peer in self._by_secret.items() if remains(peer)}


def _key(ticket: str) -> bytes:
    # A lookup by digest takes a time that reveals nothing about the ticket.
    return hashlib.sha256(ticket.encode()).digest()


class PeerExchange:
    """A session's connections to other executors: an inbox for incoming and routes for outgoing transfers."""

    def __init__(
        self,
        peer_listener: PeerListener,
        memory: DeviceMemory | None = None,
        wakeup: Callable[[], None] = lambda: None,
    ) -> None:
        """`memory`: exports device memory to executors of this host, and opens their device memory.

        `wakeup`: ends a pause of the session.
        """
        self._wakeup = wakeup
        self.link_measurements = LinkMeasurements()
        self.inbox = TransferInbox(self.link_measurements, peer_listener.patience, memory=memory, wakeup=wakeup)
        self._memory = memory
        self.number = 0
        self._peer_listener = peer_listener
        self._routes: dict[int, Route] = {}
        self._past = (0, 0)  # bytes and transfers sent to executors that have left the pool
        self._lock = threading.Lock()  # the control channel's thread also adds routes
        self.begun = threading.Event()  # set once the numbers of received transfers are restored
        self._journal = Journal()
        self._accepted: Mapping[int, int] = {}
        self._closed = False

    # --- journal -----------------------------------------------------------------------------------------------

    def begin(self, journal: Journal, counts: PoolCounts) -> None:
        """Log transfers to `journal`. Restore earlier transfers from the journal and the `counts` of its snapshot."""
        self.number = counts.number
        self._journal = journal
        self.inbox.begin(journal, counts.arrived)
        past = journal.past
        self._accepted = past.acknowledged if past is not None else {}
        for peer, sent_count in counts.sent.items():
            self._route(peer).restore(sent_count, counts.taken.get(peer, 0))
        for transfer, items in past.under_way() if past is not None else ():
            self._route(transfer.peer).restore_unacknowledged(transfer.header, items)
        self.begun.set()

    def state(self) -> tuple[PoolCounts, list[Record]]:
        """Return numbers and records of transfers for a snapshot. The caller holds `inbox.journal_lock`."""
        arrival_counts, queued = self.inbox.state()
        memory = self._memory
        records = [
            arrival.record(log_records.ARRIVAL, items if memory is None else memory.in_host_memory(items))
            for arrival, items in queued
        ]
        sent_counts: dict[int, int] = {}
        acknowledged: dict[int, int] = {}
        for peer, route in list(self._routes.items()):
            unacknowledged = route.unacknowledged()
            sent_counts[peer], acknowledged[peer] = route.counts
            records += [transfer.record(log_records.UNDER_WAY, items) for transfer, items in unacknowledged]
        return PoolCounts(self.number, sent_counts, acknowledged, arrival_counts), records

    # --- connections ------------------------------------------------------------------------------------------

    def issue_ticket(self, source: int) -> PeerTicket:
        """Return a ticket with which executor `source` of the pool connects to this session.

        Raises:
            ProtocolError: the session has ended.
        """
        if self._closed:
            raise ProtocolError("the session has ended")
        return self._peer_listener.issue_ticket(self.inbox, source)

    def connect(self, request: ConnectPeer) -> ConnectPeerReply:
        """Connect to another executor, and return the reply. If the connection fails, the reply has the reason."""
        if self._closed:
            return ConnectPeerReply(request.peer, error="the session has ended")
        self.number = request.me
        reasons: list[str] = []
        for url in request.urls:
            if not has_transport(url, self._peer_listener.transports_to(request.fingerprint)):
                reasons.append(f"{url}: no installed transport connects to this URL")
                continue
            transport = transport_for(url, self._peer_listener.transports_to(request.fingerprint))
            # Otherwise a client could let the executor connect to any process on this host.
            if transport.capabilities.same_host and not is_own_socket(url):
                reasons.append(f"{url}: not the socket of an executor")
                continue
            try:
                connection, peer_attached = self._dial(url, request.fingerprint, request.ticket)
                latency, bandwidth = _measure_link(connection)
            except (DjinnError, TimeoutError) as error:
                reasons.append(f"{url}: {error}")
                continue
            redial = partial(self._redial, url, request.fingerprint, peer_attached.secret)
            opens = peer_attached.opens and transport.capabilities.same_host and self.inbox.opens
            self._route(request.peer).adopt(connection, peer_attached.received, redial, opens=opens)
            return ConnectPeerReply(request.peer, url, latency, bandwidth)
        return ConnectPeerReply(request.peer, error="; ".join(reasons) or "the executor has no listen address")

    def note_connected(self, request: ConnectPeer, reply: ConnectPeerReply) -> None:
        """In a replay, restore the route of a logged connection. The client will ask to connect it again."""
        self.number = request.me
        if not reply.error:
            self._route(request.peer)

    def _dial(self, url: str, fingerprint: str, ticket: str) -> tuple[Connection, PeerAttached]:
        transports = self._peer_listener.transports_to(fingerprint)
        connection = transport_for(url, transports).connect(url, Limits(), DIAL_SECONDS)
        try:
            connection.send(Frame(encode(PeerAttach(ticket))))
            return connection, expect(connection.receive(DIAL_SECONDS).head, PeerAttached)
        except BaseException:
            connection.close()
            raise

    def _redial(self, url: str, fingerprint: str, secret: str) -> tuple[Connection, int]:
        connection, peer_attached = self._dial(url, fingerprint, secret)
        return connection, peer_attached.received

    def _route(self, peer: int) -> Route:
        with self._lock:
            route = self._routes.get(peer)
            if route is None:
                note_acknowledged = partial(self._journal.acknowledged, peer)
                patience = self._peer_listener.patience
                route = Route(peer, self.link_measurements, patience, note_acknowledged, self._memory, self._wakeup)
                self._routes[peer] = route
                route.restore(0, self._accepted.get(peer, 0))
            return route

    # --- values ------------------------------------------------------------------------------------------------

    def send(self, transfer: int, peer: int, pack: Callable[[], list[Packed]]) -> Iterator[Wait]:
        """Wait until the route's queue is not full, then queue the values that `pack` returns.

        Do nothing if the receiver acknowledged the transfer before a recovery.

        Raises:
            ProtocolError: there is no route to that executor.
        """
        route = self._routes.get(peer)
        if route is None:
            raise ProtocolError(f"there is no route to executor {peer}: the client must connect the executors first")
        number = route.number()
        if number is not None:
            yield Wait(((Cause.ROOM, peer),), has_arrived=lambda _: route.has_room)
            route.send(number, transfer, pack())

    def may_export(self, peer: int) -> bool:
        """Return True if executor `peer` may open device memory of this executor."""
        route = self._routes.get(peer)
        return route is not None and route.opens

    def expect(self, transfer: int, source: int) -> Generator[Wait, None, list[Packed] | str]:
        """Wait for a transfer from executor `source`, and return its values, or the reason why it cannot arrive."""
        while isinstance(result := self.inbox.take(transfer, source), Wait):
            yield result
        return result

    def drop(self, peer: int) -> None:
        """Disconnect an executor that has left the pool, and revoke its tickets and secrets."""
        self._peer_listener.forget(self.inbox, peer)
        self.inbox.forget(peer)
        with self._lock:
            route = self._routes.pop(peer, None)
        if route is not None:
            close_routes([route])
            self._past = (self._past[0] + route.bytes_sent, self._past[1] + route.counts[0])

    def measure_link(self, peer: int) -> None:
        """Measure the link to an executor, if there is a connection and the link is idle."""
        if peer in self._routes:
            self._routes[peer].measure_link()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this session sent to other executors."""
        return self._past[0] + sum(route.bytes_sent for route in list(self._routes.values()))

    @property
    def transfers(self) -> tuple[int, int]:
        """Numbers of transfers that were sent to and received from other executors."""
        sent_count = self._past[1] + sum(route.counts[0] for route in list(self._routes.values()))
        return sent_count, self.inbox.arrived

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes of transfers that other executors have not acknowledged."""
        return sum(route.unacknowledged_bytes for route in list(self._routes.values()))

    def close(self) -> None:
        """Disconnect all executors."""
        self._closed = True
        self._peer_listener.forget(self.inbox)
        with self._lock:
            routes = list(self._routes.values())
            self._routes.clear()
        close_routes(routes)
        self.inbox.close()


def close_routes(routes: Sequence[Route]) -> None:
    """Send the queues of routes and disconnect, within `CLOSING_SECONDS` in total."""
    until = time.monotonic() + CLOSING_SECONDS
    for route in routes:
        route.finish()
    for route in routes:
        route.close(until)


CLOSING_SECONDS: Final = 5.0  # for sending queued transfers at the end of a session


def _measure_link(connection: Connection) -> tuple[float, float]:
    """Measure a link: return its latency in seconds and its bandwidth in bytes per second."""
    try:
        return measure(connection.send, connection.receive)
    except BaseException:
        connection.close()
        raise


_CONTROL_SECONDS = 60.0  # without a message, after which the channel is closed


def serve_control_channel(connection: Connection, exchange: PeerExchange) -> None:
    """Answer the messages of a client's control channel until it is closed."""
    if not exchange.begun.wait(_CONTROL_SECONDS):  # the session is still being recovered from its journal
        refuse(connection, "the session is still being recovered: try again", retry=True)
        return
    try:
        send_message(connection, Resumed(0, instance()))
        while True:
            message = receive_message(connection, _CONTROL_SECONDS)
            if isinstance(message, PeerTicketRequest):
                send_message(connection, exchange.issue_ticket(message.source))
            elif isinstance(message, ConnectPeer):
                send_message(connection, exchange.connect(message))
            else:
                raise ProtocolError(f"unexpected message {type(message).__name__} on a control channel")
    except (TransportError, TimeoutError) as error:
        _log.debug("a control channel ended", reason=str(error))
    except ProtocolError as error:
        _log.warning("closed a client's control channel after a protocol error", error=str(error))
        complain(connection, str(error))
