"""Idle sessions: their values are moved to the host's memory, then to disk, and come back with the next message."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import msgspec

from djinn_core.errors import SessionLost
from djinn_core.logs import get_logger
from djinn_server.context import ExecutorContext
from djinn_server.memory.room import OUT_OF_MEMORY
from djinn_server.memory.session_memory import SessionMemory
from djinn_server.peers.exchange import PeerExchange
from djinn_server.recovery.executor_channel import ExecutorChannel
from djinn_server.recovery.journal import StateParts, TakeState
from djinn_server.recovery.snapshot_format import Snapshot, decode_snapshot, encode_snapshot, put_values
from djinn_server.running.fair_share import Share
from djinn_server.running.values import Poison, ValueTable
from djinn_server.weights.reads import WeightReads

HOST: Final = "host"
DISK: Final = "disk"
COMING_BACK_SECONDS: Final = 60.0  # for which a session waits for memory of the device
_log = get_logger("djinn.server")


@attrs.frozen
class IdleValues:
    """The values of an idle session.

    Attributes:
        where: `HOST` or `DISK`.
        nbytes: bytes of the values, those included that are read again from where they came.
        read: the state of the session and the memory of its values; raises SessionLost.
    """

    where: str
    nbytes: int
    read: Callable[[], tuple[Snapshot, Sequence[memoryview]]]


def next_place(where: str, device: str) -> str:
    """The place that the values of an idle session move to next; empty: none.

    Args:
        where: place at which they are; empty: on the device.
        device: its kind. What a CPU computes with is in the host's memory already.
    """
    return {HOST: DISK, DISK: ""}.get(where, DISK if device == "cpu" else HOST)


class IdleMoves:
    """Moves the values of one session off its device while it is idle, and back. Used by the session's thread.

    A journal that begins with a snapshot is where they are on disk, so that a process that dies meanwhile loses nothing.

    Attributes:
        aside: where the values are; None while they are on the device.
        at: time at which they move next; None before the session pauses.
    """

    def __init__(
        self,
        context: ExecutorContext,
        turn: Share,
        values: ValueTable,
        reads: WeightReads,
        exchange: PeerExchange,
        memory: SessionMemory | None,
    ) -> None:
        """`turn`: the session's turn on the device. `memory`: its memory under a limit, which moves one value at a time."""
        self._context = context
        self._runtime = context.device.runtime
        self._turn = turn
        self._values = values
        self._reads = reads
        self._exchange = exchange
        self._memory = memory
        self.aside: IdleValues | None = None
        self.at: float | None = None

    def deadline(self, connection: ExecutorChannel, state: TakeState) -> float | None:
        """Return when the values of the idle session move next; None: never. If that time has come, move them.

        `state`: returns the state of the session with its values.
        """
        seconds = self._context.idle_seconds
        if not seconds:
            return None
        now = time.monotonic()
        if self.at is None:
            self.at = now + seconds
        elif now >= self.at:
            with self._context.moving:
                self.at = now + seconds if self._give_way(connection, state) else math.inf
        return self.at if self.at < math.inf else None

    def _give_way(self, connection: ExecutorChannel, state: TakeState) -> bool:
        """Move the values one place further; False if they stay from now on."""
        if self._memory is not None:
            self._memory.evict_all()
            return False
        place = next_place(self.aside.where if self.aside is not None else "", self._runtime.device.type)
        if not place or (self.aside is None and not len(self._values)):
            return False
        found = self._in_memory(state) if place == HOST else self._on_disk(connection, state)
        if found is None:
            return self.aside is None  # it was in the middle of something, or has no journal
        _log.info("an idle session gave way", place=place, bytes=found.nbytes)
        self.aside = found
        self._values.clear()
        self._reads.shares.clear()
        self._context.trimmer.soon()
        return place != DISK

    def _in_memory(self, state: TakeState) -> IdleValues | None:
        nbytes, found = self._values.nbytes(), state()
        if found is None:
            return None
        try:
            snapshot, memory = decode_snapshot(found[0]), [memoryview(part) for part in found[1]]
        except (RuntimeError, MemoryError) as error:
            _log.warning("an idle session stays on the device: host memory is too small", error=str(error))
            return None
        return IdleValues(HOST, nbytes, lambda: (snapshot, memory))

    def _on_disk(self, connection: ExecutorChannel, state: TakeState) -> IdleValues | None:
        aside = self.aside
        nbytes = self._values.nbytes() if aside is None else aside.nbytes
        kept = state if aside is None else lambda: self._state_of(aside)
        reader = connection.journal.put_aside(connection.at_rest, kept, self._exchange.inbox.writing)
        if reader is None or reader.base is None:
            return None
        self._context.usage.count("journal_snapshots")
        encoded = reader.base.state
        return IdleValues(DISK, nbytes, lambda: (decode_snapshot(encoded), reader.memory()))

    def _state_of(self, aside: IdleValues) -> StateParts:
        """The state of a session whose values are not here, with the transfers that have come meanwhile."""
        snapshot, memory = aside.read()
        counts, transfers = self._exchange.state()
        promised = [digest for digest, _ in snapshot.promised]
        self._reads.hold_only({one.version for one in snapshot.stored}.union(promised))
        return encode_snapshot(msgspec.structs.replace(snapshot, pool=counts)), memory, transfers

    def come_back(self, pause: Callable[[float], None]) -> None:
        """Bring the values back to the device if they are on the host or on disk. Calls `pause` to wait for device memory.

        Raises:
            SessionLost: the device has had no memory for them for a while, or what was kept cannot be read.
        """
        if self.aside is None:
            return
        deadline = time.monotonic() + COMING_BACK_SECONDS
        while not self._restored(self.aside):
            if time.monotonic() > deadline:
                raise SessionLost(f"the device has no {self.aside.nbytes:,} bytes for an idle session to come back")
            _log.warning("an idle session waits for memory to come back to", bytes=self.aside.nbytes)
            pause(1.0)
        self.aside = None

    def _restored(self, aside: IdleValues) -> bool:
        """Make the values; False if there is no memory for some."""
        with self._context.moving, self._turn:
            snapshot, memory = aside.read()
            put_values(snapshot, memory, self._values, self._runtime)
            self._reads.read_again(snapshot.stored)
            values = [value for _, value in self._values.items()]
            if not any(isinstance(value, Poison) and value.failure.kind in OUT_OF_MEMORY for value in values):
                return True
            self._values.clear()
            self._reads.shares.clear()
            return False

    def figures(self) -> dict[str, int]:
        """Bytes that are not on the device because the session is idle, by place; for any thread."""
        if self._memory is not None:
            return {f"idle_{where}": nbytes for where, nbytes in self._memory.evicted_to().items()}
        aside = self.aside
        return {f"idle_{aside.where}": aside.nbytes} if aside is not None else {}
