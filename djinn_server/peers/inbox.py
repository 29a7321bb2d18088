"""Inbox of transfers from other executors. Each transfer is received once, in order, and logged before the acknowledgement."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Final, cast

import attrs
import torch

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection, Frame, Limits
from djinn_core.wire.messages import decode, encode, expect
from djinn_core.wire.peer_messages import LinkProbe, PeerAttached, TransferAck, TransferChunk, TransferHeader
from djinn_server.peers.device_memory import DeviceMemory, without_exports
from djinn_server.peers.link_probe import LinkMeasurements
from djinn_server.peers.packed_values import Packed, check_layout, room_for
from djinn_server.recovery import log_records
from djinn_server.recovery.journal import Journal
from djinn_server.recovery.log_records import LoggedTransfer
from djinn_server.session_machine import Cause, Wait
from djinn_server.system.memory import total_bytes

WAITING_TRANSFERS: Final = 4096  # queued for the session; beyond, the inbox stops reading from other executors
WAITING_BYTES: Final = 1 << 30  # of queued transfers, as `KEPT_LIMIT` of a sender. One transfer may be larger
COMING_SECONDS: Final = 60.0  # that an executor has to connect for the first time
_SAID_TRANSFERS: Final = 16  # received before the next acknowledgement
_SAID_BYTES: Final = 1 << 20


class TransferInbox:
    """Queue of transfers from other executors to one session.

    If the inbox is full, it stops reading, which slows the senders down. It still reads from an executor for which the
    session waits.
    """

    def __init__(
        self,
        sightings: LinkMeasurements | None = None,
        patience: float = 0.0,
        limit: int = 0,
        memory: DeviceMemory | None = None,
        wakeup: Callable[[], None] = lambda: None,
    ) -> None:
        """Make an empty inbox.

        Args:
            sightings: records the bandwidth of transfers.
            patience: seconds within which a disconnected sender may reconnect.
            limit: maximum bytes of queued transfers; 0: half of the machine's memory.
            memory: opens device memory that other executors export.
            wakeup: called when a transfer has arrived or a sender has left.
        """
        self._wakeup = wakeup
        self._events = 0  # arrivals of transfers, and connections that ended
        self._limit = limit or _half_of_memory()
        self._sightings = sightings or LinkMeasurements()
        self._patience = patience
        self._memory = memory
        self._arrived: dict[int, tuple[LoggedTransfer, list[Packed]]] = {}
        self._nbytes = 0  # of queued transfers and of transfers that are being received
        self._awaited: int | None = None  # the source that the session waits for
        self._closed = False
        self._counts: dict[int, int] = {}  # by source, of what came from there directly
        self._connections: dict[int, Connection] = {}
        self._left: set[int] = set()  # sources that do not come back
        self._gone: dict[int, tuple[str, float]] = {}  # by source, why it is gone and until when it may come back
        self._changed = threading.Condition()
        self._journal = Journal()
        # Held while transfers are received and journaled: the thread that compacts the journal takes it.
        self.writing = threading.RLock()

    def begin(self, journal: Journal, counts: Mapping[int, int]) -> None:
        """Log transfers to `journal`, starting after the transfers that an earlier process has received.

        `counts`: number of transfers received before the journal's snapshot, by executor.
        """
        self._journal = journal
        for before in (counts, journal.past.arrived if journal.past is not None else {}):
            for source, count in before.items():
                self._counts[source] = max(count, self._counts.get(source, 0))

    @property
    def opens(self) -> bool:
        """True if senders on this host may export device memory. False with a journal, which needs the bytes."""
        return self._memory is not None and self._memory.runtime.opens_memory and not self._journal.open

    @property
    def arrived(self) -> int:
        """Number of transfers received directly from other executors."""
        return sum(list(self._counts.values()))

    # --- from executors ----------------------------------------------------------------------------------------

    def join(self, source: int, connection: Connection) -> int:
        """Register the connection of executor `source`. Return how many of its transfers were received.

        Raises:
            TransportError: the executor has left the pool.
        """
        with self._changed:
            if source in self._left:
                raise TransportError(f"executor {source} has left the pool")
            before = self._connections.get(source)
            self._connections[source] = connection
            self._gone.pop(source, None)
        if before is not None:
            before.close()
        with self.writing:  # what the connection before has brought whole
            return self._counts.get(source, 0)

    def leave(self, source: int, connection: Connection, reason: str) -> None:
        """Record that a connection of executor `source` has ended. It may reconnect within `patience` seconds."""
        with self._changed:
            if self._connections.get(source) is connection:
                del self._connections[source]
                self._gone[source] = (reason, time.monotonic() + self._patience)
            self._notify()

    def forget(self, source: int) -> None:
        """Record that executor `source` has left the pool, and close its connection."""
        with self._changed:
            self._left.add(source)
            connection = self._connections.pop(source, None)
            self._gone.pop(source, None)
            self._changed.notify_all()
        if connection is not None:
            connection.close()

    def unload(self, header: TransferHeader, receive: Callable[[], Frame], source: int = 0) -> int | None:
        """Receive a transfer, as `unloading` does. `receive`: returns the next frame."""
        with closing(self.unloading(header, source)) as steps:
            try:
                next(steps)
                while True:
                    steps.send(receive())
            except StopIteration as end:
                return cast("int | None", end.value)

    def unloading(self, header: TransferHeader, source: int = 0) -> Generator[None, Frame, int | None]:
        """Receive a transfer whose header has arrived. The caller sends further frames to the generator.

        `source`: number of the sending executor; 0 if the client relays. Return how many transfers of this executor were
        received. Return None if its exported memory cannot be opened.

        Raises:
            TransportError: the connection has ended.
            ProtocolError: the frames do not match the header, or queued transfers exceed the limit.
        """
        size = sum(item.size for item in header.items)
        self._reserve(size, source)
        taken_in = False
        try:
            if source and any(item.exported for item in header.items):
                buffers = self._open(header)
                if buffers is None:
                    return None
                header = without_exports(header)
            else:
                buffers = yield from self._receive(header, source, size)
            with self.writing:
                count, taken_in = self._take_in(
                    LoggedTransfer(source, header), list(zip(header.items, buffers, strict=True))
                )
                return count
        finally:
            if not taken_in:
                self._release(size)

    def _receive(self, header: TransferHeader, source: int, size: int) -> Generator[None, Frame, Sequence[memoryview]]:
        buffers = [room_for(item) for item in header.items]
        began = time.perf_counter()
        for buffer in buffers:
            yield from _fill(buffer)
        if source:
            self._sightings.arrived(source, size, time.perf_counter() - began)
        return buffers

    def _open(self, header: TransferHeader) -> Sequence[memoryview | torch.Tensor] | None:
        for item in header.items:
            check_layout(item)
            if item.size and not item.exported:
                raise ProtocolError("a transfer exports the memory of some items but not of all")
        return self._memory.open(header.items) if self._memory is not None and self.opens else None

    def _reserve(self, size: int, source: int) -> None:
        """Wait until the inbox has room for `size` bytes.

        Do not wait for transfers that the client relays, because the session itself reads them.
        """
        with self._changed:
            if source:
                self._changed.wait_for(lambda: self._may_receive(source))
            if self._nbytes + size > self._limit:
                raise ProtocolError(
                    f"queued transfers of a session would have {self._nbytes + size:,} bytes; the limit is {self._limit:,} bytes, half of "
                    "the memory of this machine. Send fewer values before the programs that use them"
                )
            self._nbytes += size

    def _may_receive(self, source: int) -> bool:
        has_room = self._nbytes < WAITING_BYTES and len(self._arrived) < WAITING_TRANSFERS
        return has_room or self._closed or source in self._left or source == self._awaited

    def _release(self, size: int) -> None:
        with self._changed:
            self._nbytes -= size
            self._changed.notify_all()

    def _take_in(self, arrival: LoggedTransfer, items: list[Packed]) -> tuple[int, bool]:
        """Queue a transfer. Return how many transfers its sender has delivered, and False if it is a duplicate."""
        source, number = arrival.peer, arrival.header.number
        count = self._counts.get(source, 0)
        if source and number != count + 1:
            if number > count:
                raise ProtocolError(f"transfer {number} of executor {source} arrived after {count}: one is missing")
            return count, False  # again
        with self._changed:
            before = self._arrived.pop(arrival.header.transfer, None)
            self._nbytes -= _bytes_of(before[1]) if before is not None else 0
            self._arrived[arrival.header.transfer] = arrival, items
            self._notify()
        if source:  # what comes through the client is among the frames
            self._counts[source] = number
            self._journal.append(*arrival.record(log_records.ARRIVAL, items))
        return number, True

    # --- to the session ----------------------------------------------------------------------------------------

    def take(self, transfer: int, source: int) -> list[Packed] | str | Wait:
        """Remove a transfer from the queue and return its values.

        Return the reason if it cannot arrive, or a `Wait` if it has not arrived yet.
        """
        past = self._journal.past
        if past is not None and (before := past.take_arrival(transfer)) is not None:
            return before
        with self._changed:
            if source not in self._connections:
                self._gone.setdefault(source, ("the transfer has not arrived", time.monotonic() + self._coming))
            items = self._arrived.pop(transfer, None)
            lost = items is None and self._is_lost(source)
            self._awaited = source if items is None and not lost else None
            self._nbytes -= _bytes_of(items[1]) if items is not None else 0
            self._changed.notify_all()
            if items is not None:
                return items[1]
            if lost:
                return self._gone[source][0]
            reason, events = self._gone.get(source), self._events
            until = reason[1] if reason is not None else None
            return Wait(((Cause.TRANSFER, transfer),), until, has_arrived=lambda _: self._events != events)

    def _notify(self) -> None:
        """Wake up the session and the threads that receive from other executors."""
        self._events += 1
        self._changed.notify_all()
        self._wakeup()

    @property
    def _coming(self) -> float:
        return max(self._patience, COMING_SECONDS)

    def _is_lost(self, source: int) -> bool:
        reason = self._gone.get(source)
        return reason is not None and time.monotonic() >= reason[1]

    def state(self) -> tuple[dict[int, int], list[tuple[LoggedTransfer, list[Packed]]]]:
        """Return the number of received transfers by sender, and the queued transfers. The caller holds `writing`."""
        with self._changed:
            waiting = self._journal.past.take_arrivals() if self._journal.past is not None else []
            self._arrived |= {arrival.header.transfer: (arrival, items) for arrival, items in waiting}
            self._nbytes += sum(_bytes_of(items) for _, items in waiting)
            return dict(self._counts), list(self._arrived.values())

    def close(self) -> None:
        """Disconnect all other executors."""
        with self._changed:
            connections = list(self._connections.values())
            self._closed = True
            self._changed.notify_all()
        for connection in connections:
            connection.close()


@attrs.frozen
class PeerConnection:
    """Permission of another executor, which showed a valid ticket, to deliver values to an inbox.

    Attributes:
        inbox: inbox of the session.
        source: number of the other executor.
        secret: credential with which it may reconnect.
    """

    inbox: TransferInbox
    source: int
    secret: str = attrs.field(default="", repr=False)

    def serve(self, connection: Connection) -> None:
        """Receive transfers until the connection ends.

        Raises:
            TransportError: the connection has ended.
            ProtocolError: the other executor sent a message other than a transfer.
        """
        reason = "the executor that had it closed the connection"
        try:
            connection.limits = Limits()
            received = self.inbox.join(self.source, connection)
            connection.send(Frame(encode(PeerAttached(received, self.secret, self.inbox.opens))))
            self._take_all(connection)
        except (TransportError, ProtocolError) as error:
            reason = str(error)
            raise
        finally:
            self.inbox.leave(self.source, connection, reason)

    def _take_all(self, connection: Connection) -> None:
        unsaid = unsaid_bytes = 0
        while True:
            message = decode(connection.receive().head)
            if isinstance(message, LinkProbe):
                connection.send(Frame(encode(LinkProbe())))
            elif isinstance(message, TransferHeader):
                received = self.inbox.unload(message, connection.receive, self.source)
                if received is None:
                    connection.send(Frame(encode(TransferAck(max(message.number - 1, 0), wants_bytes=True))))
                    continue
                unsaid, unsaid_bytes = unsaid + 1, unsaid_bytes + sum(item.size for item in message.items)
                exported = any(item.exported for item in message.items)  # the sender waits, and holds the memory
                if exported or unsaid >= _SAID_TRANSFERS or unsaid_bytes >= _SAID_BYTES:
                    connection.send(Frame(encode(TransferAck(received))))
                    unsaid = unsaid_bytes = 0
            else:
                raise ProtocolError(f"the sending executor sent an unexpected message of type {type(message).__name__}")


@functools.cache
def _half_of_memory() -> int:
    return total_bytes() // 2


def _bytes_of(items: list[Packed]) -> int:
    return sum(len(data) for _, data in items)


def _fill(buffer: memoryview) -> Generator[None, Frame, None]:
    filled = 0
    while filled < len(buffer):
        frame = yield
        expect(frame.head, TransferChunk)
        for part in frame.body:
            octets = memoryview(part)
            if filled + octets.nbytes > len(buffer):
                raise ProtocolError("a transfer sent more bytes than it announced")
            buffer[filled : filled + octets.nbytes] = octets
            filled += octets.nbytes
