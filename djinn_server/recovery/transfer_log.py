"""Journal records of transfers between executors: those received, and those sent that may have to be resent.

A session is a deterministic state machine over its client's frames and the transfers that it receives
(`server/recovery/journal.py`). A transfer from another executor is journaled before it is acknowledged. Sent transfers are
recomputed in a replay; only those sent before a snapshot, and not acknowledged by then, are stored with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from djinn_core.errors import SessionLost
from djinn_core.wire.frames import Buffer, Frame
from djinn_core.wire.peer_messages import TransferHeader

if TYPE_CHECKING:  # who only removes journals has no use for torch
    from djinn_server.peers.packed_values import Packed

ARRIVED, UNDER_WAY, ACCEPTED = b"A", b"O", b"P"  # kinds of records
KINDS: Final = frozenset((ARRIVED, UNDER_WAY, ACCEPTED))
TransferRecord = tuple[bytes, bytes, Sequence[Buffer]]  # as `Journal.append` takes it
WriteDown = Callable[[bytes, bytes, Sequence[Buffer]], None]


class TransferArrival(msgspec.Struct, frozen=True):
    """A transfer that came from executor `source`; 0: through the client."""

    source: int
    header: TransferHeader

    def record(self, items: Iterable[Packed]) -> TransferRecord:
        """The journal record for this."""
        return ARRIVED, _encoder.encode(self), [data for _, data in items if isinstance(data, memoryview) and len(data)]


class UnacknowledgedTransfer(msgspec.Struct, frozen=True):
    """A transfer that was sent to executor `peer` and not acknowledged at the snapshot."""

    peer: int
    header: TransferHeader

    def record(self, items: Iterable[Packed]) -> TransferRecord:
        """The journal record for this."""
        return (
            UNDER_WAY,
            _encoder.encode(self),
            [data for _, data in items if isinstance(data, memoryview) and len(data)],
        )


class TransfersAcknowledged(msgspec.Struct, frozen=True):
    """Number of transfers that executor `peer` has acknowledged: a process that replays the journal need not send them."""

    peer: int
    transfers: int

    def record(self) -> TransferRecord:
        """The journal record for this."""
        return ACCEPTED, _encoder.encode(self), ()


# Made at the import: msgspec crashes where two threads have it inspect a class for the first time together.
_arrivals: msgspec.msgpack.Decoder[TransferArrival] = msgspec.msgpack.Decoder(TransferArrival)
_unacknowledged: msgspec.msgpack.Decoder[UnacknowledgedTransfer] = msgspec.msgpack.Decoder(UnacknowledgedTransfer)
_acknowledged: msgspec.msgpack.Decoder[TransfersAcknowledged] = msgspec.msgpack.Decoder(TransfersAcknowledged)


class PoolCounts(msgspec.Struct, frozen=True):
    """Counts of transfers of a session in a pool at a snapshot.

    `number` is this executor's number in the pool. By number of the other executor: transfers `sent` to it, the number of them that
    it has acknowledged (`taken`), and transfers that `arrived` from it.
    """

    number: int = 0
    sent: dict[int, int] = {}
    taken: dict[int, int] = {}
    arrived: dict[int, int] = {}


_encoder = msgspec.msgpack.Encoder()


def _unread(start: int) -> Frame:
    raise SessionLost(f"there is no journal to read at {start}")


class PastTransfers:
    """Transfers recorded in a journal."""

    def __init__(self, read: Callable[[int], Frame] = _unread) -> None:
        """`read`: the record at a place in the journal. Used by one thread at a time."""
        self._read = read
        self._places: dict[int, int] = {}  # of what arrived, by transfer
        self._under_way: list[int] = []
        self.arrived: dict[int, int] = {}
        self.accepted: dict[int, int] = {}

    def note(self, kind: bytes, start: int, head: bytes) -> None:
        """Index a record found at offset `start`.

        Raises:
            SessionLost: it cannot be read.
        """
        try:
            if kind == ACCEPTED:
                accepted = _acknowledged.decode(head)
                self.accepted[accepted.peer] = max(accepted.transfers, self.accepted.get(accepted.peer, 0))
            elif kind == UNDER_WAY:
                _unacknowledged.decode(head)  # what is wrong with it is said before anything is made of the others
                self._under_way.append(start)
            else:
                arrival = _arrivals.decode(head)
                self._places[arrival.header.transfer] = start
                self.arrived[arrival.source] = max(arrival.header.number, self.arrived.get(arrival.source, 0))
        except msgspec.MsgspecError as error:
            raise SessionLost(f"a journal has a transfer that cannot be read: {error}") from error

    def taken(self, transfer: int) -> list[Packed] | None:
        """The values of an incoming transfer from the journal; removed, so that a second call returns None."""
        start = self._places.pop(transfer, None)
        return None if start is None else self._arrival(start)[1]

    def waiting(self) -> list[tuple[TransferArrival, list[Packed]]]:
        """Transfers that were received and that the session has not used since."""
        return [self._arrival(start) for start in self._places.values()]

    def under_way(self) -> list[tuple[UnacknowledgedTransfer, list[Packed]]]:
        """Transfers that were sent before the snapshot and not acknowledged by then."""
        found = [self._read(start) for start in self._under_way]
        self._under_way.clear()
        sent = [_unacknowledged.decode(frame.head) for frame in found]
        return [(one, _packed(one.header, frame)) for one, frame in zip(sent, found, strict=True)]

    def _arrival(self, start: int) -> tuple[TransferArrival, list[Packed]]:
        frame = self._read(start)
        arrival = _arrivals.decode(frame.head)
        return arrival, _packed(arrival.header, frame)


def _packed(header: TransferHeader, frame: Frame) -> list[Packed]:
    whole = [item for item in header.items if item.size]
    if [item.size for item in whole] != [memoryview(buffer).nbytes for buffer in frame.body]:
        raise SessionLost("a journal has a transfer whose bytes are not those of its items")
    buffers = iter(frame.body)
    return [(item, memoryview(next(buffers)) if item.size else memoryview(b"")) for item in header.items]
