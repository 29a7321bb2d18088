"""Inbox of transfers from other executors. Transfers arrive once, in order, and are logged before acknowledgement."""

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
from djinn_server.peers.packed_values import Packed, allocate_item, check_layout
from djinn_server.recovery import log_records
from djinn_server.recovery.journal import Journal
from djinn_server.recovery.log_records import LoggedTransfer
from djinn_server.session_machine import Cause, Wait
from djinn_server.system.memory import total_bytes

QUEUED_TRANSFERS: Final = 4096  # above this number, the inbox stops reading from other executors
QUEUED_BYTES: Final = 1 << 30  # as `UNACKNOWLEDGED_BYTES` of a sender. One transfer may be larger
CONNECT_SECONDS: Final = 60.0  # in which an executor must connect for the first time
_ACK_TRANSFERS: Final = 16  # received transfers after which an acknowledgement is sent
_ACK_BYTES: Final = 1 << 20  # received bytes after which an acknowledgement is sent


class TransferInbox:
    """Queue of transfers from other executors to one session.

    If the inbox is full, it stops reading, which slows down the senders. It still reads from an executor for whose
    transfer the session waits.
    """

    def __init__(
        self,
        link_measurements: LinkMeasurements | None = None,
        patience: float = 0.0,
        limit: int = 0,
        memory: DeviceMemory | None = None,
        wakeup: Callable[[], None] = lambda: None,
    ) -> None:
        """Create an empty inbox.

        Args:
            link_measurements: records the bandwidth of transfers.
            patience: seconds within which a disconnected sender may reconnect.
            limit: maximum bytes of queued transfers; 0: half of the machine's memory.
            memory: opens device memory that other executors export.
            wakeup: called when a transfer has arrived or a sender has left.
        """
        self._wakeup = wakeup
        self._events = 0  # arrivals of transfers, and connections that ended
        self._limit = limit or _half_of_memory()
        self._link_measurements = link_measurements or LinkMeasurements()
        self._patience = patience
        self._memory = memory
        self._arrivals: dict[int, tuple[LoggedTransfer, list[Packed]]] = {}
        self._nbytes = 0  # of queued transfers and of transfers that are being received
        self._awaited: int | None = None  # the source for whose transfer the session waits
        self._closed = False
        self._counts: dict[int, int] = {}  # by source: number of transfers that came directly from it
        self._connections: dict[int, Connection] = {}
        self._departed: set[int] = set()  # sources that have left the pool
        self._disconnected: dict[
            int, tuple[str, float]
        ] = {}  # by source: why it is disconnected, and until when it may reconnect
        self._changed = threading.Condition()
        self._journal = Journal()
        # Held while a transfer is queued and journaled, and while the journal is compacted.
        self.journal_lock = threading.RLock()

    def begin(self, journal: Journal, counts: Mapping[int, int]) -> None:
        """Log transfers to `journal`, starting after the transfers that an earlier process has received.

        `counts`: number of transfers received before the journal's snapshot, by executor.
        """
        self._journal = journal
        for past_counts in (counts, journal.past.arrived if journal.past is not None else {}):
            for source, count in past_counts.items():
                self._counts[source] = max(count, self._counts.get(source, 0))

    @property
    def opens(self) -> bool:
        """True if senders on this host may export device memory. It is False with a journal, which needs the bytes."""
        return self._memory is not None and self._memory.runtime.opens_memory and not self._journal.open

    @property
    def arrived(self) -> int:
        """Number of transfers received directly from other executors."""
        return sum(list(self._counts.values()))

    # --- receiving from executors ------------------------------------------------------------------------------

    def join(self, source: int, connection: Connection) -> int:
        """Register the connection of executor `source`. Return how many of its transfers were received.

        Raises:
            TransportError: the executor has left the pool.
        """
        with self._changed:
            if source in self._departed:
                raise TransportError(f"executor {source} has left the pool")
            before = self._connections.get(source)
            self._connections[source] = connection
            self._disconnected.pop(source, None)
        if before is not None:
            before.close()
        with self.journal_lock:  # waits for a transfer that the previous connection has completed
            return self._counts.get(source, 0)

    def leave(self, source: int, connection: Connection, reason: str) -> None:
        """Record that a connection of executor `source` has ended. The executor may reconnect within `patience`."""
        with self._changed:
            if self._connections.get(source) is connection:
                del self._connections[source]
                self._disconnected[source] = (reason, time.monotonic() + self._patience)
            self._notify()

    def forget(self, source: int) -> None:
        """Record that executor `source` has left the pool, and close its connection."""
        with self._changed:
            self._departed.add(source)
            connection = self._connections.pop(source, None)
            self._disconnected.pop(source, None)
            self._changed.notify_all()
        if connection is not None:
            connection.close()

    def receive(self, header: TransferHeader, receive_frame: Callable[[], Frame], source: int = 0) -> int | None:
        """Receive a transfer, as `receiving` does. `receive_frame`: returns the next frame."""
        with closing(self.receiving(header, source)) as steps:
            try:
                next(steps)
                while True:
                    steps.send(receive_frame())
            except StopIteration as end:
                return cast("int | None", end.value)

    def receiving(self, header: TransferHeader, source: int = 0) -> Generator[None, Frame, int | None]:
        """Receive a transfer whose header has arrived. The caller sends further frames to the generator.

        `source`: number of the sending executor; 0 if the client relays. Return the number of the latest transfer
        received from this sender, or None if the exported memory cannot be opened.

        Raises:
            TransportError: the connection has ended.
            ProtocolError: the frames do not match the header, or queued transfers exceed the limit.
        """
        size = sum(item.size for item in header.items)
        self._reserve(size, source)
        is_queued = False
        try:
            if source and any(item.exported for item in header.items):
                buffers = self._open(header)
                if buffers is None:
                    return None
                header = without_exports(header)
            else:
                buffers = yield from self._receive(header, source, size)
            with self.journal_lock:
                count, is_queued = self._queue(
                    LoggedTransfer(source, header), list(zip(header.items, buffers, strict=True))
                )
                return count
        finally:
            if not is_queued:
                self._release(size)

    def _receive(self, header: TransferHeader, source: int, size: int) -> Generator[None, Frame, Sequence[memoryview]]:
        buffers = [allocate_item(item) for item in header.items]
        began = time.perf_counter()
        for buffer in buffers:
            yield from _fill(buffer)
        if source:
            self._link_measurements.arrived(source, size, time.perf_counter() - began)
        return buffers

    def _open(self, header: TransferHeader) -> Sequence[memoryview | torch.Tensor] | None:
        for item in header.items:
            check_layout(item)
            if item.size and not item.exported:
                raise ProtocolError("a transfer exports the memory of some items, but not of all items")
        return self._memory.open(header.items) if self._memory is not None and self.opens else None

    def _reserve(self, size: int, source: int) -> None:
        """Wait until the inbox is not full, and reserve `size` bytes.

        Do not wait for a transfer that the client relays, because the session itself reads it.
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
        has_room = self._nbytes < QUEUED_BYTES and len(self._arrivals) < QUEUED_TRANSFERS
        return has_room or self._closed or source in self._departed or source == self._awaited

    def _release(self, size: int) -> None:
        with self._changed:
            self._nbytes -= size
            self._changed.notify_all()

    def _queue(self, arrival: LoggedTransfer, items: list[Packed]) -> tuple[int, bool]:
        """Queue and journal a transfer, except a duplicate. Return its sender's latest number, and True if queued."""
        source, number = arrival.peer, arrival.header.number
        count = self._counts.get(source, 0)
        if source and number != count + 1:
            if number > count:
                raise ProtocolError(f"transfer {number} of executor {source} arrived after {count}: one is missing")
            return count, False
        with self._changed:
            before = self._arrivals.pop(arrival.header.transfer, None)
            self._nbytes -= _bytes_of(before[1]) if before is not None else 0
            self._arrivals[arrival.header.transfer] = arrival, items
            self._notify()
        if source:  # the client's frames, which are journaled, contain relayed transfers
            self._counts[source] = number
            self._journal.append(*arrival.record(log_records.ARRIVAL, items))
        return number, True

    # --- delivery to the session -------------------------------------------------------------------------------------

    def take(self, transfer: int, source: int) -> list[Packed] | str | Wait:
        """Remove a transfer from executor `source` from the queue, and return its values.

        Return the reason why the transfer cannot arrive, or a `Wait` if it has not arrived yet.
        """
        past = self._journal.past
        if past is not None and (replayed := past.take_arrival(transfer)) is not None:
            return replayed
        with self._changed:
            if source not in self._connections:
                deadline = time.monotonic() + self._connect_seconds
                self._disconnected.setdefault(source, ("the transfer has not arrived", deadline))
            items = self._arrivals.pop(transfer, None)
            is_lost = items is None and self._is_lost(source)
            self._awaited = source if items is None and not is_lost else None
            self._nbytes -= _bytes_of(items[1]) if items is not None else 0
            self._changed.notify_all()
            if items is not None:
                return items[1]
            if is_lost:
                return self._disconnected[source][0]
            reason, events = self._disconnected.get(source), self._events
            until = reason[1] if reason is not None else None
            return Wait(((Cause.TRANSFER, transfer),), until, has_arrived=lambda _: self._events != events)

    def _notify(self) -> None:
        """Wake up the session and the threads that receive from other executors."""
        self._events += 1
        self._changed.notify_all()
        self._wakeup()

    @property
    def _connect_seconds(self) -> float:
        return max(self._patience, CONNECT_SECONDS)

    def _is_lost(self, source: int) -> bool:
        reason = self._disconnected.get(source)
        return reason is not None and time.monotonic() >= reason[1]

    def state(self) -> tuple[dict[int, int], list[tuple[LoggedTransfer, list[Packed]]]]:
        """Return the number of received transfers by sender, and the queued transfers. The caller holds `journal_lock`."""
        with self._changed:
            queued = self._journal.past.take_arrivals() if self._journal.past is not None else []
            self._arrivals |= {arrival.header.transfer: (arrival, items) for arrival, items in queued}
            self._nbytes += sum(_bytes_of(items) for _, items in queued)
            return dict(self._counts), list(self._arrivals.values())

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
    """Permission of an executor, which showed a valid ticket, to deliver values to an inbox.

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
        reason = "the sending executor closed the connection"
        try:
            connection.limits = Limits()
            received_count = self.inbox.join(self.source, connection)
            connection.send(Frame(encode(PeerAttached(received_count, self.secret, self.inbox.opens))))
            self._receive_all(connection)
        except (TransportError, ProtocolError) as error:
            reason = str(error)
            raise
        finally:
            self.inbox.leave(self.source, connection, reason)

    def _receive_all(self, connection: Connection) -> None:
        unacknowledged = unacknowledged_bytes = 0
        while True:
            message = decode(connection.receive().head)
            if isinstance(message, LinkProbe):
                connection.send(Frame(encode(LinkProbe())))
            elif isinstance(message, TransferHeader):
                received_count = self.inbox.receive(message, connection.receive, self.source)
                if received_count is None:
                    connection.send(Frame(encode(TransferAck(max(message.number - 1, 0), wants_bytes=True))))
                    continue
                unacknowledged += 1
                unacknowledged_bytes += sum(item.size for item in message.items)
                has_exports = any(item.exported for item in message.items)  # the sender waits, and keeps the memory
                if has_exports or unacknowledged >= _ACK_TRANSFERS or unacknowledged_bytes >= _ACK_BYTES:
                    connection.send(Frame(encode(TransferAck(received_count))))
                    unacknowledged = unacknowledged_bytes = 0
            else:
                raise ProtocolError(f"the sending executor sent an unexpected message of type {type(message).__name__}")


@functools.cache
def _half_of_memory() -> int:
    return total_bytes() // 2


def _bytes_of(items: list[Packed]) -> int:
    return sum(len(data) for _, data in items)


def _fill(buffer: memoryview) -> Generator[None, Frame, None]:
    size = 0
    while size < len(buffer):
        frame = yield
        expect(frame.head, TransferChunk)
        for part in frame.body:
            octets = memoryview(part)
            if size + octets.nbytes > len(buffer):
                raise ProtocolError("a transfer sent more bytes than it announced")
            buffer[size : size + octets.nbytes] = octets
            size += octets.nbytes
