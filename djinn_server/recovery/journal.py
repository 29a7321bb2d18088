"""Write-ahead journal of a session, from which another executor process recovers the session.

A session is a deterministic state machine. Its state follows from received frames and transfers, and from logged
decisions: stop points, out-of-memory errors, contents of the weight store, checksums of replies. A record is written
before it takes effect, by one `write` to the page cache. So the journal survives the process, but not the machine. An
incomplete last record is ignored. Snapshots replace the journal from time to time (`SnapshotSchedule`), which bounds the
replay.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from djinn_core.errors import SessionLost
from djinn_core.logs import get_logger
from djinn_core.protocol.delivery.record_log import Buffers, LazyBuffers, RecordWriter, record_size, sizes_of
from djinn_core.protocol.delivery.snapshot_schedule import SNAPSHOT_SECONDS, SnapshotSchedule, reply_checksum
from djinn_core.system.files import CLOEXEC, NOFOLLOW
from djinn_core.system.processes import lock_file
from djinn_core.wire.frames import Frame
from djinn_server.disk_quota import STEP, DiskQuota
from djinn_server.recovery import log_records as records
from djinn_server.recovery.blob_files import BlobFiles, contents_folder
from djinn_server.recovery.journal_reader import JournalReader
from djinn_server.recovery.journal_versions import MAGIC
from djinn_server.recovery.log_records import NO_SESSION, Record, SessionIdentity, SnapshotHeader
from djinn_server.system.private_files import check_private

CROWDED_SECONDS: Final = 1.0  # least time between two snapshots of a journal that has reached half of its limit
_ROUNDED: Final = b"rounded"  # logged instead of a checksum
_SHOWN: Final = 40  # maximum bytes of a decision in messages
_log = get_logger("djinn.server")

# State of a session between two frames: the encoded snapshot, the memory of its values, and records of queued and unfinished
# transfers. The memory is valid until the next frame.
StateParts = tuple[bytes, Buffers, Sequence[Record]]
TakeState = Callable[[], StateParts | None]


class Position(NamedTuple):
    """Numbers of frames that a session's channel has received and sent, and its unacknowledged replies."""

    received: int
    sent: int
    replies: Sequence[Frame]


# Holds a session's channel between two frames. None if frames wait in its queue.
Rest = Callable[[], AbstractContextManager[Position | None]]


class SnapshotTooLarge(OSError):  # noqa: N818 - a signal within this file
    """A snapshot would exceed the limit of its journal. Raised before the snapshot is written."""


class Journal:
    """Log the records of a session, and replay the log of an earlier process.

    Any thread may append records. Only the session's thread replays and compacts the journal.

    Attributes:
        contents: blob files of the journal.
        past: the log of an earlier process, until a snapshot replaces it; else None.
        is_half_full: True if the records have more than half of the maximum size of the journal.
    """

    def __init__(
        self,
        path: Path = Path(os.devnull),
        owner: SessionIdentity = NO_SESSION,
        limit: int = 0,
        disk: DiskQuota | None = None,
        every: float = SNAPSHOT_SECONDS,
    ) -> None:
        """Create a closed journal, which logs nothing. `begin` and `resume` return open journals.

        Args:
            path: path of the journal's file.
            owner: identity of the session.
            limit: maximum size in bytes; a larger journal is abandoned.
            disk: the tenant's disk quota.
            every: minimum seconds between two snapshots.
        """
        self.path = path
        self.contents = BlobFiles(contents_folder(path))
        self.past: JournalReader | None = None
        self._owner = owner
        self._limit = limit
        self._disk = disk or DiskQuota()
        self._schedule = SnapshotSchedule(every, CROWDED_SECONDS)
        self._lock = threading.RLock()
        self._file = -1
        self._records = RecordWriter(-1, 0)
        self._recovering = False
        self._deleted = False
        self._blob_bytes = 0  # bytes of blob files without another hard link
        self._check_at = 0  # size at which quota and disk are checked next
        self._refused_bytes: float = math.inf  # size of the last state that was too large for a snapshot
        self.is_half_full = False

    @classmethod
    def begin(
        cls, path: Path, owner: SessionIdentity, limit: int, disk: DiskQuota, every: float = SNAPSHOT_SECONDS
    ) -> Journal:
        """Create a journal.

        Raises:
            OSError: the file cannot be written, or another process uses it.
        """
        journal = cls(path, owner, limit, disk, every)
        journal._open()
        try:
            os.write(journal._file, MAGIC)
        except OSError:
            journal.end()
            raise
        journal._records.size = len(MAGIC)
        journal.append(records.HEADER, records.encode_header(owner), ())
        return journal

    @classmethod
    def resume(
        cls, path: Path, past: JournalReader, limit: int, disk: DiskQuota, every: float = SNAPSHOT_SECONDS
    ) -> Journal:
        """Open the journal of an earlier process, which `past` reads. Call `begin_replay` next.

        Raises:
            OSError: the file cannot be written, or another process uses it.
        """
        journal = cls(path, past.owner, limit, disk, every)
        journal._open()
        journal.past = past
        return journal

    def _open(self) -> None:
        self._file = _open_locked(self.path)
        self._records = RecordWriter(self._file, os.fstat(self._file).st_size)
        self._disk.set_usage(self.path, self._records.size)

    @property
    def open(self) -> bool:
        """True while the journal is written, so that another process can recover the session."""
        return self._file >= 0

    @property
    def nbytes(self) -> int:
        """Bytes of the journal, and of its blob files that have no other hard link."""
        return self._records.size + self._blob_bytes

    # --- logging ----------------------------------------------------------------------------------------------

    def frame(self, frame: Frame) -> Frame:
        """Log a received frame, and return it. A body that goes to a blob file is decompressed."""
        if not frame.body:
            self.append(records.FRAME, frame.head, ())
            return frame
        try:
            stored_part = self.contents.write_part(frame)
        except OSError as error:
            self.give_up(f"cannot write an upload to a blob file: {error}")
            return frame
        if stored_part is None:
            self.append(records.FRAME, frame.head, frame.body)
            return frame
        self.append(records.PART, records.encode(stored_part[1]), ())
        return stored_part[0]

    def expect(self, handle: int, digest: bytes, size: int, is_replay: bool) -> None:
        """Start a blob file for the upload of `handle`, with this digest. `is_replay`: as in `BlobFiles.expect`."""
        if not self.open:
            return
        try:
            if self.contents.expect(handle, digest, size, is_replay):
                self._blob_bytes += size
                if self._records.size + self._blob_bytes > self._check_at:
                    self._check_limits(self._records.size)
        except OSError as error:
            self.give_up(f"cannot write an upload to a blob file: {error}")

    def stopped(self, submission: int, op: int, reason: str = "") -> None:
        """Log that a submission stopped before op `op`.

        `reason`: the device error; empty if the submission was cancelled.
        """
        self.append(records.STOP, records.encode(records.StoppedAt(submission, op, reason)), ())

    def ran_out_of_memory(self, submission: int, op: int, reason: str) -> None:
        """Log that an op ran out of memory, so that it also fails in a replay."""
        self.append(records.SHORTAGE, records.encode(records.StoppedAt(submission, op, reason)), ())

    def acknowledged(self, peer: int, transfers: int) -> None:
        """Log how many transfers executor `peer` has acknowledged."""
        self.append(records.ACKNOWLEDGED, records.encode(records.TransfersAcknowledged(peer, transfers)), ())

    def checked(self, frame: Frame) -> Frame:
        """Log the checksum of a reply's values, and return the reply. In a replay, compare the checksum.

        Raises:
            SessionLost: the checksum differs.
        """
        if not frame.body:
            return frame
        if self.past is not None:
            self.decide(lambda before: before if before == _ROUNDED else b"%d" % reply_checksum(frame.body))
        elif self._file >= 0:
            self.append(records.DECISION, b"%d" % reply_checksum(frame.body), ())
        return frame

    def rounded(self, frame: Frame) -> Frame:
        """Log a reply without a checksum of its values, because a replay may round them differently. Return the reply."""
        if frame.body and (self.open or self.past is not None):
            self.decide(lambda before: before or _ROUNDED)
        return frame

    def decide(self, decision: Callable[[bytes | None], bytes]) -> bytes:
        """Return the result of `decision`, and log it. `decision` receives the logged result in a replay, else None.

        Raises:
            SessionLost: in a replay, the result differs from the logged result.
        """
        logged_result = self.past.next_decision() if self.past is not None else None
        result = decision(logged_result)
        if logged_result is None:
            self.append(records.DECISION, result, ())
        elif result != logged_result:
            difference = f"logged {logged_result[:_SHOWN]!r}, replayed {result[:_SHOWN]!r}"
            raise SessionLost(f"a replay differs from its journal: {difference}. The session cannot be recovered")
        return result

    def decided(self) -> bytes | None:
        """Return the result of the next decision if an earlier process has logged it, else None."""
        return self.past.decision if self.past is not None else None

    # --- the replay -------------------------------------------------------------------------------------------

    def begin_replay(self) -> None:
        """Truncate an incomplete record, and log the start of a recovery attempt. `Leases` limits the attempts.

        Raises:
            OSError: the journal cannot be written.
        """
        assert self.past is not None
        with self._lock:
            os.ftruncate(self._file, self.past.end)
            self._records.size = self.past.end
        if self.past.base is not None:  # the replay counts the files of later uploads again
            self._blob_bytes = self.contents.own_bytes({digest for _, digest in self.past.base.elsewhere})
            self._disk.set_usage(self.path, self.nbytes)
        self.append(records.ATTEMPT, b"", ())
        self._recovering = True

    @property
    def replaying(self) -> bool:
        """True while the session replays the log of an earlier process."""
        return self.past is not None and not self.past.over

    # --- snapshots --------------------------------------------------------------------------------------------

    def snapshot_if_due(self, at_rest: Rest, state: TakeState, transfers_lock: AbstractContextManager[object]) -> bool:
        """Replace the journal by a snapshot, if a snapshot is due (`SnapshotSchedule`). Called between two frames.

        Return True if the journal was replaced.

        Args:
            at_rest: `ExecutorChannel.at_rest`.
            state: returns the session's state, or None if it cannot be saved now.
            transfers_lock: lock that prevents other threads from logging transfers meanwhile.
        """
        if self._recovering and not self.replaying:
            self._recovering = False
            self.append(records.ATTEMPT, b"done", ())  # a later crash does not count as a failed recovery
            if not self.open:
                self._close_past()
                self.past = None
        if not self.open:
            return False
        start, schedule = time.monotonic(), self._schedule
        if start < (schedule.due_if_large if self.is_half_full else schedule.due):
            return False
        with at_rest() as position:
            if position is None or self.replaying:
                return False
            is_replaced = self._snapshot(position, state, transfers_lock)
        schedule.record_snapshot(start, failed=is_replaced is False)
        return bool(is_replaced)

    def _snapshot(self, position: Position, state: TakeState, lock: AbstractContextManager[object]) -> bool | None:
        """Replace the journal by a snapshot, as `compact` does. Return None if the state cannot be saved now."""
        with lock:
            parts = state() if self.open else None
            if parts is None:
                return None
            encoded_state, memory, transfers = parts
            base = SnapshotHeader(position.received, position.sent, encoded_state)
            is_replaced = self.compact(base, memory, position.replies, transfers)
        if is_replaced:
            self._close_past()
            self.past = None
        return is_replaced

    def compact(
        self,
        base: SnapshotHeader,
        memory: Buffers,
        unacknowledged: Sequence[Frame],
        transfers: Sequence[Record] = (),
    ) -> bool:
        """Replace the journal by a snapshot: the session's state, its memory, and its unacknowledged replies.

        `transfers`: records of queued and unfinished transfers. Buffers of `memory` are read one at a time. A large buffer
        is written to a blob file, unless a blob file has it. If the process dies in this call, the old journal remains.

        Return False if the journal is unchanged: it is closed, the state exceeds the limit, the disk is full, or a
        value cannot be read. Sizes are checked before bytes are written.
        """
        if not self.open:
            return False
        replies = [(records.REPLY, frame.head, frame.body) for frame in unacknowledged]
        small_records: list[Record] = [(records.HEADER, records.encode_header(self._owner), ()), *replies, *transfers]
        least = len(MAGIC) + sum(record_size(head, body) for _, head, body in small_records)
        sizes, file_sizes, before = sizes_of(memory), self.contents.sizes(), self.contents.digests()
        state = sum(sizes) + least
        if state >= self._refused_bytes:
            return False
        path, is_replaced = self.path.with_suffix(".new"), False
        try:
            self._charge(path, least + sum(size for size in sizes if size not in file_sizes))
            digest_by_position = self.contents.write_large(memory, lambda nbytes: self._charge(path, least + nbytes))
            inline_positions = [position for position in range(len(sizes)) if position not in digest_by_position]
            inline_buffers = LazyBuffers(
                [sizes[position] for position in inline_positions], lambda number: memory[inline_positions[number]]
            )
            base = msgspec.structs.replace(base, elsewhere=tuple(digest_by_position.items()))
            snapshot = (records.SNAPSHOT, records.encode(base), inline_buffers)
            nbytes, digests = least + record_size(snapshot[1], inline_buffers), set(digest_by_position.values())
            self._check_size(nbytes + self.contents.own_bytes(digests))
            self._charge(path, nbytes + self.contents.own_bytes(digests - before))
            is_replaced = self._replace(path, (small_records[0], snapshot, *small_records[1:]))
        except (OSError, RuntimeError, MemoryError) as error:
            if isinstance(error, SnapshotTooLarge):
                self._skip_snapshot(state)
            else:
                _log.warning(
                    "cannot compact a journal: it grows until --journal-gib or a later snapshot",
                    session=self._owner.session,
                    error=str(error),
                )
            return False
        finally:
            if not is_replaced:
                self.contents.retain(before)
            self._disk.release(path)
        with self._lock:
            if self._file < 0:  # another thread has ended the session
                return False
            self.contents.retain(digests)
            self._blob_bytes = self.contents.own_bytes()
            self._refused_bytes = math.inf
            self._disk.set_usage(self.path, nbytes + self._blob_bytes)
            return self._check_limits(nbytes)

    def _charge(self, path: Path, nbytes: int) -> None:
        """Charge the disk quota for a snapshot of `nbytes` bytes at `path`. Call this before writing it.

        Raises:
            OSError: the journal's limit, the quota or the disk does not allow the bytes.
        """
        self._check_size(nbytes)
        if reason := self._disk.charge(path, nbytes, path.parent):
            raise OSError(errno.EDQUOT, reason)

    def _check_size(self, nbytes: int) -> None:
        if nbytes > self._limit:
            raise SnapshotTooLarge

    def _skip_snapshot(self, nbytes: int) -> None:
        """Record that a state of `nbytes` bytes is too large. Log this once. Only a smaller state is tried again."""
        log = _log.warning if self._refused_bytes == math.inf else _log.debug
        self._refused_bytes = nbytes
        log(
            "a session's state exceeds --journal-gib: its journal is not compacted. The session remains recoverable until the journal "
            "reaches this limit",
            session=self._owner.session,
            state=nbytes,
            journal=self.nbytes,
            limit=self._limit,
        )

    def _replace(self, path: Path, content: Iterable[Record]) -> bool:
        """Write records to `path`, and replace the journal by this file. Return False if the session has ended meanwhile.

        Raises:
            OSError: the file cannot be written.
            RuntimeError, MemoryError: a buffer cannot be read.
        """
        path.unlink(missing_ok=True)
        file = _open_locked(path)
        try:
            os.write(file, MAGIC)
            writer = RecordWriter(file, len(MAGIC))
            for record in content:
                writer.append(*record)
            with self._lock:
                if self.open:
                    path.replace(self.path)
                    file, self._file, self._records = self._file, file, writer
                return self.open
        finally:
            os.close(file)
            path.unlink(missing_ok=True)

    def give_up(self, reason: str) -> None:
        """Delete the journal and log `reason`. The session continues, but can no longer be recovered."""
        if self.open:
            _log.warning(
                "a session will not outlive its executor: it continues, but is lost if its executor dies. Free disk space or raise "
                "--journal-gib for later sessions",
                session=self._owner.session,
                reason=reason,
            )
            self.end()

    def end(self) -> None:
        """Delete the journal, because the session has ended or will not be recovered."""
        if self.open:
            self.leave()
            self.path.unlink(missing_ok=True)
            self._deleted = True
            if self.past is None:  # a replay still reads the blob files
                self.contents.end()

    def close(self) -> None:
        """Delete the journal, and close the journal of an earlier process."""
        self.end()
        self._close_past()

    def _close_past(self) -> None:
        if self.past is not None:
            self.past.close()
            if self._deleted:
                self.contents.end()

    def leave(self) -> None:
        """Close the journal without deleting it, so that another process can continue the session."""
        with self._lock:
            if self.open:
                os.close(self._file)
                self._file = -1
                self._disk.release(self.path)

    def append(self, kind: bytes, head: bytes, body: Buffers) -> None:
        """Write a record if the journal is open. Abandon a journal that would exceed a limit or cannot be written."""
        with self._lock:
            if self._file < 0:
                return
            log = self._records
            size = log.size + record_size(head, body)
            if size + self._blob_bytes > self._check_at and not self._check_limits(size):
                return
            try:
                log.append(kind, head, body)
            except OSError as error:
                self.give_up(f"its journal cannot be written: {error}")

    def shared(self, size: int) -> None:
        """Record that the weight store shares `size` bytes, so that the journal is no longer charged for them."""
        self._blob_bytes = max(0, self._blob_bytes - size)
        self._check_at -= size
        if self.open:
            self._disk.set_usage(self.path, self._records.size + self._blob_bytes)

    def _check_limits(self, nbytes: int) -> bool:
        """Return True if limit, quota and disk allow `nbytes` bytes of records. Otherwise abandon the journal."""
        half = self._limit // 2
        size = nbytes + self._blob_bytes
        self.is_half_full = nbytes > half
        self._check_at = min(size + STEP, self._limit, self._limit if self.is_half_full else half + self._blob_bytes)
        if size > self._limit:
            self.give_up(f"its journal has more than {self._limit:,} bytes")
        elif reason := self._disk.charge(self.path, size, self.path.parent):
            self.give_up(reason)
        return self.open


def _open_locked(path: Path) -> int:
    """Open or create the file of a journal, lock it, and return the descriptor.

    Raises:
        OSError: the file cannot be opened, or another process holds its lock.
    """
    file = os.open(path, os.O_CREAT | os.O_RDWR | NOFOLLOW | CLOEXEC, 0o600)
    try:
        check_private(path, os.fstat(file), "600")
        lock_file(file)
    except OSError:
        os.close(file)
        raise
    return file


def journal_path(directory: Path, session: str) -> Path | None:
    """Return the path of a session's journal, or None if the session's name is invalid."""
    letters = session.replace("-", "").replace("_", "")
    return directory / f"{session}.journal" if letters.isascii() and letters.isalnum() and len(session) <= 64 else None
