"""Route from a session to another executor. Transfers are kept until acknowledged, and resent over a new connection."""

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
from djinn_server.peers.link_probe import WORTH, LinkMeasurements, measure
from djinn_server.peers.packed_values import Packed
from djinn_server.recovery.log_records import LoggedTransfer

PARCEL: Final = 4 << 20  # bytes
WAITING_LIMIT: Final = 64  # transfers that were not acknowledged, before the executor waits for the link, too
KEPT_LIMIT: Final = 1 << 30  # bytes of them
ECHOES_LIMIT: Final = 16  # queued replies to probes
_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 1.0
_log = get_logger("djinn.server")

Dial = Callable[[], tuple[Connection, int]]  # to the other executor; and how many transfers it has received
NoteTaken = Callable[[int], None]


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
        sightings: LinkMeasurements,
        patience: float,
        note: NoteTaken,
        memory: DeviceMemory | None = None,
        wakeup: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a route without a connection.

        Args:
            peer: number of the other executor.
            sightings: records measurements of the link.
            patience: seconds for which a broken connection is retried.
            note: called with the number of acknowledged transfers.
            memory: copies exported memory to the host if the receiver cannot open it.
            wakeup: called when the queue may have room.
        """
        self._wakeup = wakeup
        self._peer, self._sightings, self._patience, self._note = peer, sightings, patience, note
        self._memory = memory
        self._opens = self._wants_bytes = False
        self._connection: Connection | None = None
        self._dial: Dial | None = None
        self._kept: deque[_UnacknowledgedTransfer] = deque()
        self._kept_bytes = 0
        self._numbered = 0  # transfers
        self._acknowledged = 0
        self._next = 1  # number of the one that is sent next
        self._gauges = self._closing = False
        self._broken = ""
        self._given_up_at = 0.0
        self._reconnects = ReconnectLimit()  # transfers acknowledged
        self._echoes: queue.Queue[Frame] = queue.Queue(ECHOES_LIMIT)
        self._unpaid = 0  # bytes of connections so far that are not those of transfers
        self._past_bytes = 0
        self._changed = threading.Condition()
        self._sender = threading.Thread(target=self._work, name="djinn-route", daemon=True)
        self._sender.start()

    # --- what is counted --------------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        """Bytes that were sent over this route, without link probes."""
        now = self._connection.bytes_sent if self._connection is not None else 0
        return self._past_bytes + now - self._unpaid

    @property
    def opens(self) -> bool:
        """True if the receiver may open device memory of this executor."""
        return self._opens

    @property
    def kept_bytes(self) -> int:
        """Bytes of transfers that the other executor has not acknowledged."""
        return self._kept_bytes

    @property
    def counts(self) -> tuple[int, int]:
        """Return how many transfers were sent, and how many of them were acknowledged."""
        with self._changed:
            return self._numbered, self._acknowledged

    def under_way(self) -> list[tuple[LoggedTransfer, list[Packed]]]:
        """Return the unacknowledged transfers, with their bytes in host memory."""
        with self._changed:
            every = tuple(self._kept)
        return [
            (LoggedTransfer(self._peer, unacknowledged.header), unacknowledged.items)
            for unacknowledged in map(self._with_bytes, every)
        ]

    def _with_bytes(self, kept: _UnacknowledgedTransfer) -> _UnacknowledgedTransfer:
        return kept if self._memory is None else attrs.evolve(kept, items=self._memory.in_host_memory(kept.items))

    def restore(self, sent: int, acknowledged: int) -> None:
        """Restore the numbers of sent and acknowledged transfers of an earlier process."""
        with self._changed:
            self._numbered, self._next = sent, max(self._next, acknowledged + 1)
            self._accept(acknowledged)

    def restore_kept(self, header: TransferHeader, items: list[Packed]) -> None:
        """Restore a transfer that an earlier process had sent and the receiver had not acknowledged."""
        with self._changed:
            if header.number > self._acknowledged:
                self._keep(header.number, header.transfer, items)
                self._changed.notify_all()

    # --- the session's side -----------------------------------------------------------------------------------

    def number(self) -> int | None:
        """Return the number of the next transfer; None if it is already acknowledged, or if the route was given up."""
        with self._changed:
            self._numbered += 1
            return None if self._numbered <= self._acknowledged or self._broken else self._numbered

    @property
    def has_room(self) -> bool:
        """True if the queue has room for one more transfer."""
        return bool(self._broken) or (len(self._kept) < WAITING_LIMIT and self._kept_bytes <= KEPT_LIMIT)

    def send(self, number: int, transfer: int, items: list[Packed]) -> None:
        """Queue a transfer, and keep it until it is acknowledged."""
        with self._changed:
            if not self._broken and number > self._acknowledged:
                self._keep(number, transfer, items)
                self._changed.notify_all()

    def _keep(self, number: int, transfer: int, items: list[Packed]) -> None:
        unacknowledged = _UnacknowledgedTransfer(number, transfer, items, sum(len(data) for _, data in items))
        self._kept.append(unacknowledged)
        self._kept_bytes += unacknowledged.nbytes

    def gauge(self) -> None:
        """Measure the link if it is idle. Otherwise the receiver measures the running transfers."""
        with self._changed:
            if self._connection is not None and self._waiting() is None:
                self._gauges = True
                self._changed.notify_all()

    def finish(self) -> None:
        """Send the queue and then disconnect, in the sender thread. Return at once."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self, until: float) -> None:
        """Call `finish` and wait at most until `until` (`time.monotonic`). Then disconnect in any case."""
        self.finish()
        self._sender.join(max(0.0, until - time.monotonic()))
        self._disconnect()

    def _disconnect(self) -> None:
        if (connection := self._connection) is not None:
            connection.close()

    # --- connections ------------------------------------------------------------------------------------------

    def adopt(self, connection: Connection, acknowledged: int, dial: Dial, *, opens: bool | None = None) -> None:
        """Continue over a connection whose receiver has `acknowledged` transfers. `dial`: opens a further connection.

        `opens`: new value of the property `opens`; None: unchanged.
        """
        with self._changed:
            if self._broken and acknowledged < self._numbered:
                connection.close()  # the transfer that is due there is lost: its receiver reports that once its wait times out
                return
            before, self._connection = self._connection, connection
            self._past_bytes += before.bytes_sent if before is not None else 0
            self._unpaid += connection.bytes_sent
            self._dial, self._broken = dial, ""
            self._opens = self._opens if opens is None else opens
            self._wants_bytes = False
            self._accept(acknowledged)
            self._next = acknowledged + 1
            self._changed.notify_all()
        if before is not None:
            before.close()
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
                    self._take_echo(frame)
                else:
                    raise ProtocolError(f"the receiving executor sent an unexpected {type(message).__name__}")
        except (TransportError, ProtocolError) as error:
            self._lose(connection, str(error))

    def _take_echo(self, frame: Frame) -> None:
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
        while self._kept and self._kept[0].number <= acknowledged:
            self._kept_bytes -= self._kept.popleft().nbytes
        self._wakeup()
        self._note(acknowledged)

    def _lose(self, connection: Connection, reason: str) -> None:
        """Record that a connection broke."""
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
        """Give up the route for `reason`. The receiver notices this by a timeout."""
        if not self._closing:  # with the other end's session it ends as well
            tell = _log.warning if self._waiting() is not None else _log.info
            tell("the connection to another executor is lost", peer=self._peer, error=reason)
        self._broken = reason or "the route is lost"
        self._kept.clear()
        self._kept_bytes = 0
        self._wakeup()

    # --- the sender -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while True:
            with self._changed:
                self._changed.wait_for(self._is_to_do)
                if self._closing and (self._connection is None or self._waiting() is None):
                    break
                connection, waiting, gauges = self._connection, self._waiting(), self._gauges
                dial = self._dial
            if connection is None:
                assert dial is not None
                self._dial_again(dial, backoff.pause())
                continue
            backoff.reset()
            try:
                if waiting is not None:
                    self._send(connection, waiting)
                elif gauges:
                    self._measure(connection)
            except (DjinnError, RuntimeError) as error:  # a RuntimeError of the device
                self._lose(connection, str(error))
            waiting = None  # exported memory is freed when its transfer is acknowledged
        self._disconnect()

    def _is_to_do(self) -> bool:
        if self._closing:
            return True
        if self._connection is None:
            return self._dial is not None and not self._broken
        return self._gauges or self._waiting() is not None

    def _waiting(self) -> _UnacknowledgedTransfer | None:
        """Return the next transfer to send; None if there is none."""
        index = self._next - self._kept[0].number if self._kept else 0
        return self._kept[max(index, 0)] if index < len(self._kept) else None

    def _send(self, connection: Connection, kept: _UnacknowledgedTransfer) -> None:
        if are_exported(kept.items):
            if self._open_at_receiver(connection, kept):
                return
            kept = self._with_bytes(kept)
        for frame in frames_of(kept.header, kept.items):
            connection.send(frame)
        with self._changed:
            if self._connection is connection:
                self._next = kept.number + 1

    def _open_at_receiver(self, connection: Connection, kept: _UnacknowledgedTransfer) -> bool:
        """Let the receiver open a transfer's memory. Return False if it wants bytes."""
        if self._opens:
            connection.send(Frame(encode(kept.header)))
            with self._changed:
                self._changed.wait_for(
                    lambda: self._wants_bytes or self._acknowledged >= kept.number or self._connection is not connection
                )
                self._opens &= not self._wants_bytes
                self._wants_bytes = False
                if self._acknowledged >= kept.number:
                    self._next = max(self._next, kept.number + 1)
                if self._connection is not connection or self._acknowledged >= kept.number:
                    return True
        return False

    def _dial_again(self, dial: Dial, pause: float) -> None:
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
            late = self._connection is not None or self._closing  # it came another way meanwhile
        if late:
            connection.close()
        else:
            _log.info("reconnected to another executor", peer=self._peer)
            self.adopt(connection, acknowledged, dial)

    def _measure(self, connection: Connection) -> None:
        self._gauges = False
        while not self._echoes.empty():
            self._echoes.get()  # a late reply to an earlier probe
        before = connection.bytes_sent
        try:
            latency, bandwidth = measure(connection.send, self._echo)
        except TimeoutError:
            _log.debug("a link was not measured: no reply in time", peer=self._peer)
        else:
            self._sightings.note(LinkMeasurement(self._peer, False, WORTH, WORTH / bandwidth, latency))
        self._unpaid += connection.bytes_sent - before

    def _echo(self, timeout: float) -> Frame:
        try:
            return self._echoes.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no reply in {timeout:g} s") from None


def frames_of(header: TransferHeader, items: Sequence[Packed]) -> Iterator[Frame]:
    """Yield the frames of a transfer."""
    yield Frame(encode(header))
    for _, data in items:
        if isinstance(data, memoryview):  # exported memory has no bytes here
            for start in range(0, len(data), PARCEL):
                yield Frame(encode(TransferChunk()), [data[start : start + PARCEL]])
