"""Reader of a session's journal, for the process that recovers the session."""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from djinn_core.errors import ProtocolError, SessionLost
from djinn_core.protocol.delivery.record_log import RecordReader
from djinn_core.wire.frames import Frame
from djinn_server.recovery import log_records as records
from djinn_server.recovery.blob_files import contents_folder, map_file, read_part
from djinn_server.recovery.journal_versions import MAGIC, check_magic
from djinn_server.recovery.log_records import LoggedTransfer, SessionIdentity, SnapshotHeader
from djinn_server.system.private_files import open_private

if TYPE_CHECKING:  # a process that only removes journals does not load torch
    from djinn_server.peers.packed_values import Packed

_OWNER_LIMIT: Final = 1 << 16  # bytes


class JournalReader:
    """Contents of a journal. Used by one thread at a time.

    Attributes:
        owner: identity of the session.
        end: offset after the last complete record.
        taken: number of frames that the session received, including frames before the snapshot.
        base: snapshot with which the journal begins; None if the journal begins with the session.
        stops: by number of a submission, the op before which it stopped, and the device error or "".
        shortages: errors of ops that ran out of memory, by number of the submission and of the op.
        arrived: number of transfers received directly from other executors, by executor.
        acknowledged: number of transfers that other executors have acknowledged, by executor.
        tried: number of processes in a row that died during a replay of this journal.
    """

    def __init__(self, path: Path) -> None:
        """Read the offsets of all records. Frames are read when they are requested.

        Raises:
            SessionLost: there is no journal, or it is not valid.
        """
        try:
            self._file = open_private(path)
        except OSError as error:
            raise SessionLost(f"cannot open the session's journal: {error}") from None
        self._size = os.fstat(self._file.fileno()).st_size
        self._records = RecordReader(self._file)
        self._frames: deque[int] = deque()
        self._decisions: deque[bytes] = deque()
        self._replies: list[int] = []
        self._arrivals: dict[int, int] = {}  # offsets, by transfer
        self._under_way: list[int] = []
        self._contents = contents_folder(path)
        self._base_at = 0
        self._mapped_buffers: list[tuple[int, memoryview]] | None = None
        self.base: SnapshotHeader | None = None
        self.stops: dict[int, tuple[int, str]] = {}
        self.shortages: dict[int, dict[int, str]] = {}
        self.arrived: dict[int, int] = {}
        self.acknowledged: dict[int, int] = {}
        self.tried = 0
        self.taken = 0
        try:
            self.owner, self.end = self._scan(path)
        except BaseException:
            self.close()
            raise

    def _scan(self, path: Path) -> tuple[SessionIdentity, int]:
        check_magic(self._file.read(len(MAGIC)), str(path))
        owner: SessionIdentity | None = None
        end = len(MAGIC)
        with _errors_as_lost(str(path)):
            for location in self._records.locations(end, self._size):
                end = location.start + location.size
                if location.kind == records.HEADER:
                    owner = records.read_header(self._records.head(location.start))
                else:
                    self._index(location.kind, location.start)
        if owner is None:
            raise SessionLost(f"{path} has no valid header, so the session cannot be recovered")
        return owner, end

    def _index(self, kind: bytes, start: int) -> None:
        if kind in (records.FRAME, records.PART):
            self._frames.append(start)
            self.taken += 1
            self.tried = 0
            return
        head = self._records.head(start)
        if kind == records.ATTEMPT:
            self.tried = 0 if head else self.tried + 1
        elif kind == records.REPLY:
            self._replies.append(start)
        elif kind == records.SNAPSHOT:
            self._base_at = start
            self.base = records.snapshot_headers.decode(head)
            self.taken = self.base.taken
        elif kind == records.STOP:
            stop = records.stops.decode(head)
            self.stops[stop.submission] = stop.op, stop.reason
        elif kind == records.SHORTAGE:
            stop = records.stops.decode(head)
            self.shortages.setdefault(stop.submission, {})[stop.op] = stop.reason
        elif kind == records.ARRIVAL:
            arrival = records.transfers.decode(head)
            self._arrivals[arrival.header.transfer] = start
            self.arrived[arrival.peer] = max(arrival.header.number, self.arrived.get(arrival.peer, 0))
            self.tried = 0
        elif kind == records.UNDER_WAY:
            records.transfers.decode(head)  # an invalid record is reported before the session begins
            self._under_way.append(start)
        elif kind == records.ACKNOWLEDGED:
            acknowledgement = records.acknowledgements.decode(head)
            self.acknowledged[acknowledgement.peer] = max(
                acknowledgement.transfers, self.acknowledged.get(acknowledgement.peer, 0)
            )
            self.tried = 0
        elif kind == records.DECISION:
            self._decisions.append(head)
        else:
            raise ProtocolError(f"a journal has a record of unknown kind {kind!r}")

    def is_at(self, path: Path) -> bool:
        """Return True if the file at `path` is this journal, and has not grown since it was read."""
        status = path.stat()
        return os.path.samestat(status, os.fstat(self._file.fileno())) and status.st_size == self._size

    # --- frames, replies and decisions ------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """True if all frames were replayed."""
        return not self._frames

    def next_frame(self) -> Frame:
        """Return the next frame of the journal."""
        return self._read_at(self._frames.popleft())

    def replies(self) -> list[Frame]:
        """Return the replies that were unacknowledged at the snapshot, the oldest first."""
        return [self._read_at(start) for start in self._replies]

    @property
    def decision(self) -> bytes | None:
        """Return the next logged decision without consuming it, or None if no decision is left."""
        return self._decisions[0] if self._decisions else None

    def next_decision(self) -> bytes | None:
        """Consume and return the next logged decision, or return None if no decision is left."""
        return self._decisions.popleft() if self._decisions else None

    # --- transfers --------------------------------------------------------------------------------------------

    def take_arrival(self, transfer: int) -> list[Packed] | None:
        """Return the values of a received transfer, once. Return None if the journal does not have the transfer."""
        start = self._arrivals.pop(transfer, None)
        return None if start is None else self._transfer(start)[1]

    def take_arrivals(self) -> list[tuple[LoggedTransfer, list[Packed]]]:
        """Return all received transfers that `take_arrival` has not returned, once."""
        transfers = [self._transfer(start) for start in self._arrivals.values()]
        self._arrivals.clear()
        return transfers

    def under_way(self) -> list[tuple[LoggedTransfer, list[Packed]]]:
        """Return the transfers that were sent and unacknowledged at the snapshot."""
        return [self._transfer(start) for start in self._under_way]

    def _transfer(self, start: int) -> tuple[LoggedTransfer, list[Packed]]:
        frame = self._read_at(start)
        transfer = records.transfers.decode(frame.head)
        return transfer, transfer.items(frame)

    # --- the snapshot -----------------------------------------------------------------------------------------

    def memory(self) -> Sequence[memoryview]:
        """Return the buffers of the snapshot's memory."""
        memory = [memoryview(buffer) for buffer in self._read_at(self._base_at).body]
        for position, part in self.map_files():
            memory.insert(position, part)
        return memory

    def map_files(self) -> Sequence[tuple[int, memoryview]]:
        """Map the buffers of the snapshot that are in blob files, by position. The mappings outlive the files.

        Raises:
            SessionLost: a file cannot be read, or its contents have another digest.
        """
        if self._mapped_buffers is None:
            in_blob_files = sorted(self.base.elsewhere) if self.base is not None else ()
            self._mapped_buffers = [(position, map_file(self._contents, digest)) for position, digest in in_blob_files]
        return self._mapped_buffers

    def _read_at(self, start: int) -> Frame:
        with _errors_as_lost("a record of a journal"):
            kind, head, body = self._records.read(start)
            return (
                read_part(self._contents, records.blob_frames.decode(head))
                if kind == records.PART
                else Frame(head, body)
            )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextmanager
def _errors_as_lost(what: str) -> Iterator[None]:
    try:
        yield
    except SessionLost:
        raise
    except (ProtocolError, OSError, struct.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SessionLost(f"{what} cannot be read: {error}") from error


def owner_of(path: Path) -> SessionIdentity:
    """Return the identity of a journal's session from its first record.

    Raises:
        SessionLost: there is no journal, or it is not valid.
    """
    with _errors_as_lost("the session left no journal, or its journal"), open_private(path) as file:
        check_magic(file.read(len(MAGIC)), str(path))
        reader = RecordReader(file)
        first = next(reader.locations(len(MAGIC), len(MAGIC) + _OWNER_LIMIT), None)
        if first is None or first.kind != records.HEADER:
            raise SessionLost(f"{path} has no valid header, so the session cannot be recovered")
        return records.read_header(reader.head(first.start))
