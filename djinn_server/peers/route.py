"""Route from a session to another executor. Unacknowledged transfers are stored, and resent over a new connection."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import attrs

from djinn_core.errors import DjinnError, ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection, Frame
from djinn_core.logs import get_logger
from djinn_core.protocol.backoff import Backoff
from djinn_core.protocol.delivery.reconnect_limit import ReconnectLimit
from djinn_core.wire.messages import decode, encode
from djinn_core.wire.peer_messages import LinkMeasurement, LinkProbe, TransferAck, TransferChunk, TransferHeader
from djinn_server.peers.device_memory import DeviceMemory, are_exported
from djinn_server.peers.link_probe import MEASURABLE_BYTES, LinkMeasurements, measure
from djinn_server.peers.packed_values import Packed
from djinn_server.recovery.log_records import LoggedTransfer

CHUNK_BYTES: Final = 4 << 20  # maximum body of a frame
UNACKNOWLEDGED_TRANSFERS: Final = 64  # above this number, the session waits for the link
UNACKNOWLEDGED_BYTES: Final = 1 << 30  # above this size, the session waits for the link
ECHOES_LIMIT: Final = 16  # queued replies to link probes
_FIRST_PAUSE_SECONDS: Final = 0.05
_MAX_PAUSE_SECONDS: Final = 1.0
_log = get_logger("djinn.server")

Dial = Callable[[], tuple[Connection, int]]  # connects to the receiver; returns also how many transfers it has received
NoteAcknowledged = Callable[[int], None]


@attrs.frozen
class _UnacknowledgedTransfer:
    number: int
    transfer: int
    items: list[Packed]
    nbytes: int

    @property
    def header(self) -> TransferHeader:
        return TransferHeader(self.transfer, tuple(item for item, _ in self.items), self.number)


class Route:
    """A route to another executor, with one thread that sends and one that receives acknowledgements."""

    def __init__(
        self,
        peer: int,
        link_measurements: LinkMeasurements,
        patience: float,
        note_acknowledged: NoteAcknowledged,
        memory: DeviceMemory | None = None,
        wakeup: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a route without a connection.

        Args:
            peer: number of the other executor.
            link_measurements: records measurements of the link.
            patience: seconds for which a broken connection is retried.
            note_acknowledged: called with the number of acknowledged transfers.
            memory: copies exported memory to the host if the receiver cannot open it.
            wakeup: called when the queue may no longer be full.
        """
        self._wakeup = wakeup
        self._peer, self._measurements, self._patience = peer, link_measurements, patience
        self._note_acknowledged = note_acknowledged
        self._memory = memory
        self._opens = self._wants_bytes = False
        self._connection: Connection | None = None
        self._dial: Dial | None = None
        self._unacknowledged: deque[_UnacknowledgedTransfer] = deque()
        self._unacknowledged_bytes = 0
        self._sent_count = 0  # transfers with a number
        self._acknowledged = 0
        self._next = 1  # number of the transfer that is sent next
        self._must_measure = self._closing = False
        self._loss_reason = ""
        self._given_up_at = 0.0
        self._reconnects = ReconnectLimit()  # counts breaks since the last acknowledgement
        self._echoes: queue.Queue[Frame] = queue.Queue(ECHOES_LIMIT)
        self._other_bytes = 0  # bytes of handshakes and link probes
        self._past_bytes = 0
        self._changed = threading.Condition()
        self._sender = threading.Thread(target=self._run, name="djinn-route", daemon=True)
        self._sender.start()

    # --- counts -----------------------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        """Bytes that were sent over this route, without link probes."""
        now = self._connection.bytes_sent if self._connection is not None else 0
        return self._past_bytes + now - self._other_bytes

    @property
    def opens(self) -> bool:
        """True if the receiver may open device memory of this executor."""
        return self._opens

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes of transfers that the other executor has not acknowledged."""
        return self._unacknowledged_bytes

    @property
    def counts(self) -> tuple[int, int]:
        """Return how many transfers were sent, and how many of them were acknowledged."""
        with self._changed:
            return self._sent_count, self._acknowledged

    def unacknowledged(self) -> list[tuple[LoggedTransfer, list[Packed]]]:
        """Return the unacknowledged transfers, with their bytes in host memory."""
        with self._changed:
            transfers = tuple(self._unacknowledged)
        return [
            (LoggedTransfer(self._peer, transfer.header), transfer.items)
            for transfer in map(self._with_bytes, transfers)
        ]

    def _with_bytes(self, transfer: _UnacknowledgedTransfer) -> _UnacknowledgedTransfer:
        memory = self._memory
        return transfer if memory is None else attrs.evolve(transfer, items=memory.in_host_memory(transfer.items))

    def restore(self, sent_count: int, acknowledged: int) -> None:
        """Restore the numbers of sent and acknowledged transfers of an earlier process."""
        with self._changed:
            self._sent_count, self._next = sent_count, max(self._next, acknowledged + 1)
            self._accept(acknowledged)

    def restore_unacknowledged(self, header: TransferHeader, items: list[Packed]) -> None:
        """Restore a transfer that an earlier process had sent and the receiver had not acknowledged."""
        with self._changed:
            if header.number > self._acknowledged:
                self._store(header.number, header.transfer, items)
                self._changed.notify_all()

    # --- the session's side -----------------------------------------------------------------------------------

    def number(self) -> int | None:
        """Number the next transfer. Return the number, or None if it is already acknowledged or the route is lost."""
        with self._changed:
            self._sent_count += 1
            return None if self._sent_count <= self._acknowledged or self._loss_reason else self._sent_count

    @property
    def has_room(self) -> bool:
        """True if another transfer may be queued, or if the route is lost."""
        is_short = len(self._unacknowledged) < UNACKNOWLEDGED_TRANSFERS
        return bool(self._loss_reason) or (is_short and self._unacknowledged_bytes <= UNACKNOWLEDGED_BYTES)

    def send(self, number: int, transfer: int, items: list[Packed]) -> None:
        """Queue a transfer, and store it until it is acknowledged."""
        with self._changed:
            if not self._loss_reason and number > self._acknowledged:
                self._store(number, transfer, items)
                self._changed.notify_all()

    def _store(self, number: int, transfer: int, items: list[Packed]) -> None:
        unacknowledged = _UnacknowledgedTransfer(number, transfer, items, sum(len(data) for _, data in items))
        self._unacknowledged.append(unacknowledged)
        self._unacknowledged_bytes += unacknowledged.nbytes

    def measure_link(self) -> None:
        """Measure the link if it is idle. Otherwise the receiver measures the running transfers."""
        with self._changed:
            if self._connection is not None and self._next_transfer() is None:
                self._must_measure = True
                self._changed.notify_all()

    def finish(self) -> None:
        """Send the queue and then disconnect, in the sender thread. Return at once."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self, until: float) -> None:
        """Call `finish`, wait until the queue is sent or until `until` (`time.monotonic`), and disconnect."""
        self.finish()
        self._sender.join(max(0.0, until - time.monotonic()))
        self._disconnect()

    def _disconnect(self) -> None:
        if (connection := self._connection) is not None:
            connection.close()

    # --- connections ------------------------------------------------------------------------------------------

    def adopt(self, connection: Connection, acknowledged: int, dial: Dial, *, opens: bool | None = None) -> None:
        """Continue over another connection. `acknowledged`: number of transfers that the receiver has received.

        `dial`: opens another connection. `opens`: new value of the property `opens`; None: unchanged.
        """
        with self._changed:
            if self._loss_reason and acknowledged < self._sent_count:
                connection.close()  # the next transfer is lost; the receiver reports this after a timeout
                return
            previous, self._connection = self._connection, connection
            self._past_bytes += previous.bytes_sent if previous is not None else 0
            self._other_bytes += connection.bytes_sent
            self._dial, self._loss_reason = dial, ""
            self._opens = self._opens if opens is None else opens
            self._wants_bytes = False
            self._accept(acknowledged)
            self._next = acknowledged + 1
            self._changed.notify_all()
        if previous is not None:
            previous.close()
        threading.Thread(target=self._listen, args=(connection,), name="djinn-route-answers", daemon=True).start()

    def _listen(self, connection: Connection) -> None:
        try:
            while True:
                frame = connection.receive()
                message = decode(frame.head)
                if isinstance(message, TransferAck):
                    with self._changed:
                        self._accept(message.transfers)
                        self._wants_bytes |= message.wants_bytes and self._connection is connection
                        self._changed.notify_all()
                elif isinstance(message, LinkProbe):
                    self._receive_echo(frame)
                else:
                    raise ProtocolError(f"the receiving executor sent an unexpected {type(message).__name__}")
        except (TransportError, ProtocolError) as error:
            self._lose(connection, str(error))

    def _receive_echo(self, frame: Frame) -> None:
        if frame.body:
            raise ProtocolError("the receiving executor replied to a link probe with a body")
        try:
            self._echoes.put_nowait(frame)
        except queue.Full:
            raise ProtocolError(
                f"the receiving executor sent more than {ECHOES_LIMIT} unrequested replies to link probes"
            ) from None

    def _accept(self, acknowledged: int) -> None:
        if acknowledged <= self._acknowledged:
            return
        self._acknowledged = acknowledged
        while self._unacknowledged and self._unacknowledged[0].number <= acknowledged:
            self._unacknowledged_bytes -= self._unacknowledged.popleft().nbytes
        self._wakeup()
        self._note_acknowledged(acknowledged)

    def _lose(self, connection: Connection, reason: str) -> None:
        """Record that a connection broke. Without `patience` or after too many breaks, give up; else reconnect."""
        connection.close()
        with self._changed:
            if self._connection is not connection:
                return
            self._connection = None
            self._past_bytes += connection.bytes_sent
            self._given_up_at = time.monotonic() + self._patience
            if self._reconnects.record_break(self._acknowledged) or not self._patience:
                self._give_up(reason)
            elif not self._closing:
                _log.info("the connection to another executor broke: reconnecting", peer=self._peer, reason=reason)
            self._changed.notify_all()

    def _give_up(self, reason: str) -> None:
        """Abandon the route for `reason`. The receiver notices this by a timeout."""
        if not self._closing:  # the receiver's session may simply have ended
            log = _log.warning if self._next_transfer() is not None else _log.info
            log("the connection to another executor is lost", peer=self._peer, error=reason)
        self._loss_reason = reason or "the connection is lost"
        self._unacknowledged.clear()
        self._unacknowledged_bytes = 0
        self._wakeup()

    # --- the sender -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS)
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._closing and (self._connection is None or self._next_transfer() is None):
                    break
                connection, transfer, must_measure = self._connection, self._next_transfer(), self._must_measure
                dial = self._dial
            if connection is None:
                assert dial is not None
                self._redial(dial, backoff.pause())
                continue
            backoff.reset()
            try:
                if transfer is not None:
                    self._send(connection, transfer)
                elif must_measure:
                    self._measure(connection)
            except (DjinnError, RuntimeError) as error:  # a RuntimeError of the device
                self._lose(connection, str(error))
            transfer = None  # exported memory is freed when its transfer is acknowledged
        self._disconnect()

    def _has_work(self) -> bool:
        if self._closing:
            return True
        if self._connection is None:
            return self._dial is not None and not self._loss_reason
        return self._must_measure or self._next_transfer() is not None

    def _next_transfer(self) -> _UnacknowledgedTransfer | None:
        """Return the next transfer to send, or None if all are sent."""
        index = self._next - self._unacknowledged[0].number if self._unacknowledged else 0
        return self._unacknowledged[max(index, 0)] if index < len(self._unacknowledged) else None

    def _send(self, connection: Connection, transfer: _UnacknowledgedTransfer) -> None:
        if are_exported(transfer.items):
            if self._open_at_receiver(connection, transfer):
                return
            transfer = self._with_bytes(transfer)
        for frame in frames_of(transfer.header, transfer.items):
            connection.send(frame)
        with self._changed:
            if self._connection is connection:
                self._next = transfer.number + 1

    def _open_at_receiver(self, connection: Connection, transfer: _UnacknowledgedTransfer) -> bool:
        """Let the receiver open a transfer's exported memory. Return False if the bytes must be sent instead."""
        if self._opens:
            connection.send(Frame(encode(transfer.header)))
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._wants_bytes or self._acknowledged >= transfer.number or self._connection is not connection
                    )
                )
                self._opens &= not self._wants_bytes
                self._wants_bytes = False
                if self._acknowledged >= transfer.number:
                    self._next = max(self._next, transfer.number + 1)
                if self._connection is not connection or self._acknowledged >= transfer.number:
                    return True
        return False

    def _redial(self, dial: Dial, pause: float) -> None:
        """Try to reconnect after a pause."""
        with self._changed:
            if self._changed.wait_for(lambda: self._closing or self._connection is not None, pause):
                return
        try:
            connection, acknowledged = dial()
        except (DjinnError, TimeoutError) as error:
            with self._changed:
                if time.monotonic() > self._given_up_at:
                    self._give_up(str(error))
            return
        with self._changed:
            is_late = self._connection is not None or self._closing  # the client has connected the executors meanwhile
        if is_late:
            connection.close()
        else:
            _log.info("reconnected to another executor", peer=self._peer)
            self.adopt(connection, acknowledged, dial)

    def _measure(self, connection: Connection) -> None:
        self._must_measure = False
        while not self._echoes.empty():
            self._echoes.get()  # a late reply to an earlier probe
        before = connection.bytes_sent
        try:
            latency, bandwidth = measure(connection.send, self._echo)
        except TimeoutError:
            _log.debug("a link was not measured: no reply in time", peer=self._peer)
        else:
            self._measurements.add(
                LinkMeasurement(self._peer, False, MEASURABLE_BYTES, MEASURABLE_BYTES / bandwidth, latency)
            )
        self._other_bytes += connection.bytes_sent - before

    def _echo(self, timeout: float) -> Frame:
        try:
            return self._echoes.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no reply in {timeout:g} s") from None


def frames_of(header: TransferHeader, items: Sequence[Packed]) -> Iterator[Frame]:
    """Yield the frames of a transfer."""
    yield Frame(encode(header))
    for _, data in items:
        if isinstance(data, memoryview):  # exported memory is not sent
            for start in range(0, len(data), CHUNK_BYTES):
                yield Frame(encode(TransferChunk()), [data[start : start + CHUNK_BYTES]])
