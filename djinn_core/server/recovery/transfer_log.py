"""Journal records of shipments between executors: those received, and those sent that may have to be resent.

A session is a deterministic state machine over its client's frames and the shipments that it receives
(`server/recovery/journal.py`). A shipment from another executor is journaled before it is acknowledged. Sent shipments are
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
    from djinn_core.server.peers.packed_values import Packed

ARRIVED, UNDER_WAY, ACCEPTED = b"A", b"O", b"P"  # kinds of records
KINDS: Final = frozenset((ARRIVED, UNDER_WAY, ACCEPTED))
Record = tuple[bytes, bytes, Sequence[Buffer]]  # as `Journal.append` takes it
WriteDown = Callable[[bytes, bytes, Sequence[Buffer]], None]


class Arrival(msgspec.Struct, frozen=True):
    """A shipment that came from executor `source`; 0: through the client."""

    source: int
    cargo: TransferHeader

    def record(self, items: Iterable[Packed]) -> Record:
        """The journal record for this."""
        return ARRIVED, _encoder.encode(self), [data for _, data in items if len(data)]


class UnderWay(msgspec.Struct, frozen=True):
    """A shipment that was sent to executor `peer` and not acknowledged at the snapshot."""

    peer: int
    cargo: TransferHeader

    def record(self, items: Iterable[Packed]) -> Record:
        """The journal record for this."""
        return UNDER_WAY, _encoder.encode(self), [data for _, data in items if len(data)]


class Accepted(msgspec.Struct, frozen=True):
    """Number of shipments that executor `peer` has acknowledged: a process that replays the journal need not send them."""

    peer: int
    shipments: int

    def record(self) -> Record:
        """The journal record for this."""
        return ACCEPTED, _encoder.encode(self), ()


class PoolCounts(msgspec.Struct, frozen=True):
    """Counts of shipments of a session in a pool at a snapshot.

    `number` is this executor's number in the pool. By number of the other executor: shipments `sent` to it, the number of them that
    it has acknowledged (`taken`), and shipments that `arrived` from it.
    """

    number: int = 0
    sent: dict[int, int] = {}
    taken: dict[int, int] = {}
    arrived: dict[int, int] = {}


_encoder = msgspec.msgpack.Encoder()


def _unread(start: int) -> Frame:
    raise SessionLost(f"there is no journal to read at {start}")


class PastShipments:
    """Shipments recorded in a journal."""

    def __init__(self, read: Callable[[int], Frame] = _unread) -> None:
        """`read`: the record at a place in the journal. Used by one thread at a time."""
        self._read = read
        self._places: dict[int, int] = {}  # of what arrived, by shipment
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
                accepted = msgspec.msgpack.decode(head, type=Accepted)
                self.accepted[accepted.peer] = max(accepted.shipments, self.accepted.get(accepted.peer, 0))
            elif kind == UNDER_WAY:
                msgspec.msgpack.decode(
                    head, type=UnderWay
                )  # what is wrong with it is said before anything is made of the others
                self._under_way.append(start)
            else:
                arrival = msgspec.msgpack.decode(head, type=Arrival)
                self._places[arrival.cargo.shipment] = start
                self.arrived[arrival.source] = max(arrival.cargo.number, self.arrived.get(arrival.source, 0))
        except msgspec.MsgspecError as error:
            raise SessionLost(f"a journal has a shipment that cannot be read: {error}") from error

    def taken(self, shipment: int) -> list[Packed] | None:
        """The values of an incoming shipment from the journal; removed, so that a second call returns None."""
        start = self._places.pop(shipment, None)
        return None if start is None else self._arrival(start)[1]

    def waiting(self) -> list[tuple[Arrival, list[Packed]]]:
        """Shipments that were received and that the session has not used since."""
        return [self._arrival(start) for start in self._places.values()]

    def under_way(self) -> list[tuple[UnderWay, list[Packed]]]:
        """Shipments that were sent before the snapshot and not acknowledged by then."""
        found = [self._read(start) for start in self._under_way]
        self._under_way.clear()
        sent = [msgspec.msgpack.decode(frame.head, type=UnderWay) for frame in found]
        return [(one, _packed(one.cargo, frame)) for one, frame in zip(sent, found, strict=True)]

    def _arrival(self, start: int) -> tuple[Arrival, list[Packed]]:
        frame = self._read(start)
        arrival = msgspec.msgpack.decode(frame.head, type=Arrival)
        return arrival, _packed(arrival.cargo, frame)


def _packed(cargo: TransferHeader, frame: Frame) -> list[Packed]:
    whole = [item for item in cargo.items if item.size]
    if [item.size for item in whole] != [memoryview(buffer).nbytes for buffer in frame.body]:
        raise SessionLost("a journal has a shipment whose bytes are not those of its items")
    buffers = iter(frame.body)
    return [(item, memoryview(next(buffers)) if item.size else memoryview(b"")) for item in cargo.items]
