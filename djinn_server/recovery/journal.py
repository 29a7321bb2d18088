"""Write-ahead journal of a session's input: another executor process replays it and reaches the same state.

A session is a deterministic state machine: its state follows from the frames that it received and from the decisions recorded
with them, as the state of a database follows from its log. A record is written before it takes effect, by one `write` to the page
cache: it survives the process, not the machine. An incomplete last record is ignored. Snapshots replace the journal from time to
time, which bounds the replay: `leased_connection.py` says when, `snapshot_format.py` what they contain.
"""

from __future__ import annotations

import errno
import math
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from djinn_core.errors import ProtocolError, SessionLost
from djinn_core.logs import get_logger
from djinn_core.protocol.delivery.record_log import (
    Buffers,
    LazyBuffers,
    RecordReader,
    RecordWriter,
    record_size,
    sizes_of,
)
from djinn_core.system.files import CLOEXEC, NOFOLLOW
from djinn_core.system.processes import lock_file
from djinn_core.wire.frames import Buffer, Frame
from djinn_server.disk_quota import STEP, DiskQuota
from djinn_server.launch.tickets import NO_TENANT, Badge
from djinn_server.recovery.blob_files import (
    BlobFiles,
    BlobFrame,
    contents_folder,
    mapped,
    read_part,
    remove_contents,
)
from djinn_server.recovery.transfer_log import KINDS, PastTransfers, TransferRecord

_MAGIC: Final = b"DJNJ2\n"
_HEADER, FRAME, NOTE, _SNAPSHOT, _KEPT, _TRIED, _PART = b"H", b"F", b"N", b"S", b"K", b"T", b"U"
_CUT, _SHORT = b"X", b"M"
_CUT_AT: Final = struct.Struct("<QQ")
STALE_SECONDS: Final = 600.0  # age at which an unused journal is deleted
_OWNER_LIMIT: Final = 1 << 16  # bytes
_log = get_logger("djinn.server")
Record = tuple[bytes, bytes, Buffers]  # kind, head and body


class SessionIdentity(msgspec.Struct, frozen=True):
    """Identity of a journal's session: the client's name for itself, its badge, and the secret with which it reconnects."""

    session: str
    client: str
    secret: str
    badge: Badge

    def __repr__(self) -> str:
        """Without the secret."""
        return f"SessionIdentity(session={self.session!r}, client={self.client!r})"


_NO_SESSION: Final = SessionIdentity("", "", "", NO_TENANT)


class SnapshotHeader(msgspec.Struct, frozen=True):
    """Position of a session at a snapshot: frames received and sent since its beginning, modulo 2^32, and its state.

    `elsewhere`: the parts of its memory that are in blob files and not in the journal, by position and digest.
    """

    taken: int
    sent: int
    state: bytes
    elsewhere: tuple[tuple[int, bytes], ...] = ()


# Made at the import: msgspec crashes where two threads have it inspect a class for the first time together.
_identities: msgspec.msgpack.Decoder[SessionIdentity] = msgspec.msgpack.Decoder(SessionIdentity)
_headers: msgspec.msgpack.Decoder[SnapshotHeader] = msgspec.msgpack.Decoder(SnapshotHeader)
_blobs: msgspec.msgpack.Decoder[BlobFrame] = msgspec.msgpack.Decoder(BlobFrame)


class Journal:
    """The open journal of a session. Any thread may append to it; only the session's compacts it.

    Attributes:
        is_half_full: True if it has reached half of its limit.
    """

    def __init__(self, path: Path, owner: SessionIdentity, limit: int, disk: DiskQuota) -> None:
        """`limit`: maximum size in bytes; a larger journal is abandoned. `disk`: the tenant's disk quota.

        Raises:
            OSError: it cannot be written, or another process has it.
        """
        self.path = path
        self.contents: BlobFiles | None = None
        self._owner = owner
        self._limit = limit
        self._disk = disk
        self._lock = threading.RLock()
        self._file = _open_locked(path)
        self._records = RecordWriter(self._file, os.fstat(self._file).st_size)
        self._disk.set_usage(path, self._records.size)
        self._beside = 0  # bytes of blob files that have no other link
        self._check_at = 0  # size at which quota and disk are checked next
        self._refused_bytes: float = math.inf  # size of the last state that was too large for a snapshot
        self.is_half_full = False

    @classmethod
    def begin(cls, path: Path, owner: SessionIdentity, limit: int, disk: DiskQuota) -> Journal:
        """Create a journal."""
        journal = cls(path, owner, limit, disk)
        try:
            os.write(journal._file, _MAGIC)
        except OSError:
            journal.end()
            raise
        journal._records.size = len(_MAGIC)
        journal.append(_HEADER, msgspec.msgpack.encode(owner), ())
        return journal

    @property
    def open(self) -> bool:
        """True while the journal is written."""
        return self._file >= 0

    @property
    def nbytes(self) -> int:
        """Bytes of the journal, and of blob files that are its alone."""
        return self._records.size + self._beside

    def frame(self, frame: Frame) -> Frame:
        """Journal an incoming frame; returns it, decompressed if it was stored in a blob file."""
        try:
            found = self.contents.take(frame) if self.contents is not None and frame.body else None
        except OSError as error:
            self.give_up(f"an upload cannot be written: {error}")
            return frame
        if found is None:
            self.append(FRAME, frame.head, frame.body)
            return frame
        self.append(_PART, msgspec.msgpack.encode(found[1]), ())
        return found[0]

    def expect(self, handle: int, digest: bytes, size: int, again: bool) -> None:
        """Prepare a blob file for the upload of `handle`, with this digest. `again`: as in `BlobFiles.expect`."""
        if self.contents is None or not self.open:
            return
        try:
            if self.contents.expect(handle, digest, size, again):
                self._beside += size
                if self._records.size + self._beside > self._check_at:
                    self._has_room(self._records.size)
        except OSError as error:
            self.give_up(f"an upload cannot be written: {error}")

    def cut(self, submission: int, op: int, reason: str = "") -> None:
        """Note that a submission was stopped before that op: cancelled, or by a device error, which is the reason."""
        self.append(_CUT, _CUT_AT.pack(submission, op) + reason.encode(), ())

    def ran_out_of_memory(self, submission: int, op: int, reason: str) -> None:
        """Note that an op failed because there was no memory, which may be there when the session is recovered."""
        self.append(_SHORT, _CUT_AT.pack(submission, op) + reason.encode(), ())

    def note(self, decided: bytes) -> None:
        """Record a decision that does not follow from the frames."""
        self.append(NOTE, decided, ())

    def try_again(self) -> None:
        """Record the start of a recovery attempt; too many without progress end the session."""
        self.append(_TRIED, b"", ())

    def recovered(self) -> None:
        """Record that the recovery is complete: a process that dies now dies of something else."""
        self.append(_TRIED, b"done", ())

    def compact(
        self,
        base: SnapshotHeader,
        memory: Buffers,
        kept: Sequence[Frame],
        transfers: Sequence[TransferRecord] = (),
    ) -> bool:
        """Compact the journal to a snapshot: the session's state, its memory, and answers that the client has not received yet.

        `transfers`: records of queued and unfinished transfers. If the process dies in this call, the old journal stays.

        Returns False if the journal is unchanged: the state exceeds the limit, the disk is full, or a value cannot be read. Sizes
        are checked before anything is written.
        """
        if not self.open:
            return False
        sizes = sizes_of(memory)
        others: list[Record] = [*[(_KEPT, frame.head, frame.body) for frame in kept], *transfers]
        state = sum(sizes) + sum(record_size(head, body) for _, head, body in others)
        if state >= self._refused_bytes:
            return False
        known = self.contents.sizes() if self.contents is not None else set[int]()
        least = sum(size for size in sizes if size not in known)
        try:
            found = self.contents.match(memory) if self.contents is not None and least <= self._limit else {}
            here = [position for position in range(len(sizes)) if position not in found]
            rest = LazyBuffers([sizes[position] for position in here], lambda number: memory[here[number]])
            base = msgspec.structs.replace(base, elsewhere=tuple(found.items()))
            records: list[Record] = [
                (_HEADER, msgspec.msgpack.encode(self._owner), ()),
                (_SNAPSHOT, msgspec.msgpack.encode(base), rest),
                *others,
            ]
            nbytes = len(_MAGIC) + sum(record_size(head, body) for _, head, body in records)
            beside = self.contents.own_bytes(set(found.values())) if self.contents is not None else 0
            if max(least, nbytes + beside) > self._limit:
                self._skip_snapshot(state)
                return False
            self._replace(nbytes, records)
        except (OSError, RuntimeError, MemoryError) as error:
            _log.warning("a journal was not compacted", error=str(error))
            return False
        with self._lock:
            if self._file < 0:  # another thread has ended the session
                return False
            if self.contents is not None:
                self.contents.retain(set(found.values()))
            self._beside = self.contents.own_bytes() if self.contents is not None else 0
            self._refused_bytes = math.inf
            self._disk.set_usage(self.path, nbytes + self._beside)
            return self._has_room(nbytes)

    def _skip_snapshot(self, nbytes: int) -> None:
        """Log the first time that a state is too large for a snapshot. Only a state smaller than `nbytes` is tried again."""
        log = _log.warning if self._refused_bytes == math.inf else _log.debug
        self._refused_bytes = nbytes
        log(
            "a session's state exceeds --journal-gib: its journal is not compacted, and the session is recoverable until the journal "
            "reaches this limit",
            state=nbytes,
            journal=self.nbytes,
            limit=self._limit,
        )

    def _replace(self, nbytes: int, records: Iterable[Record]) -> None:
        """Replace the journal by one of `records`, which have `nbytes` bytes, unless its session has ended meanwhile.

        Raises:
            OSError: the quota or the disk does not allow it.
            RuntimeError, MemoryError: a buffer cannot be read.
        """
        path = self.path.with_suffix(".new")
        if reason := self._disk.charge(path, nbytes, path.parent):
            raise OSError(errno.EDQUOT, reason)
        try:
            path.unlink(missing_ok=True)
            file = _open_locked(path)
            try:
                os.write(file, _MAGIC)
                writer = RecordWriter(file, len(_MAGIC))
                for record in records:
                    writer.append(*record)
                with self._lock:
                    if self.open:
                        path.replace(self.path)
                        file, self._file, self._records = self._file, file, writer
            finally:
                os.close(file)
                path.unlink(missing_ok=True)
        finally:
            self._disk.release(path)

    def truncate(self, size: int) -> None:
        """Truncate a torn record, and continue at this offset.

        Raises:
            OSError: that cannot be done.
        """
        with self._lock:
            os.ftruncate(self._file, size)
            self._records.size = size

    def give_up(self, reason: str) -> None:
        """Abandon the journal: the session cannot be recovered from now on."""
        if self.open:
            _log.warning("a session will not outlive its executor", reason=reason)
            self.end()

    def end(self) -> None:
        """Delete the journal of a session that has ended or will not be recovered."""
        if self.open:
            self.leave()
            self.path.unlink(missing_ok=True)
            if self.contents is not None:
                self.contents.end()

    def leave(self) -> None:
        """Close without deleting, so that another process can continue the journal."""
        with self._lock:
            if self.open:
                os.close(self._file)
                self._file = -1
                self._disk.release(self.path)

    def append(self, kind: bytes, head: bytes, body: Sequence[Buffer]) -> None:
        """Write a record. Do nothing if the journal is closed; close it if the record exceeds its limit."""
        with self._lock:
            if self._file < 0:
                return
            records = self._records
            size = records.size + record_size(head, body)
            if size + self._beside > self._check_at and not self._has_room(size):
                return
            try:
                records.append(kind, head, body)
            except OSError as error:
                self.give_up(f"its journal cannot be written: {error}")

    def shared(self, size: int) -> None:
        """Note that `size` bytes are now shared with the weight store and no longer count here."""
        self._beside = max(0, self._beside - size)
        self._check_at -= size
        if self.open:
            self._disk.set_usage(self.path, self._records.size + self._beside)

    def _has_room(self, records: int) -> bool:
        """Return True if the journal may have `records` bytes of records. Otherwise give the journal up."""
        half = self._limit // 2
        size = records + self._beside
        self.is_half_full = records > half
        self._check_at = min(size + STEP, self._limit, self._limit if self.is_half_full else half + self._beside)
        if size > self._limit:
            self.give_up(f"its journal has more than {self._limit:,} bytes")
        elif reason := self._disk.charge(self.path, size, self.path.parent):
            self.give_up(reason)
        return self.open


class JournalReader:
    """The contents of a journal, for the process that recovers its session.

    Attributes:
        owner: identity of the session.
        taken: number of frames taken.
        base: the snapshot with which the journal begins; None: it begins with the session.
        cuts: for each stopped submission, by number, the op before which it was stopped, and the device error that was the reason.
        short: the ops that ran out of memory, by submission and number, with the error.
        transfers: values that came from other executors or went there.
        tried: number of processes that have died while they replayed it.
    """

    def __init__(self, path: Path) -> None:
        """Read the locations of all records; frames are read when they are requested.

        Raises:
            SessionLost: there is no journal, or it is not valid.
        """
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise SessionLost(f"the session left no journal: {error}") from None
        self._records = RecordReader(self._file)
        self._frames: deque[int] = deque()
        self._notes: deque[bytes] = deque()
        self._kept: list[int] = []
        self.transfers = PastTransfers(self._read_at)
        self._contents = contents_folder(path)
        self._base_at = 0
        self._mapped: list[tuple[int, memoryview]] | None = None
        self.base: SnapshotHeader | None = None
        self.cuts: dict[int, tuple[int, str]] = {}
        self.short: dict[int, dict[int, str]] = {}
        self.tried = 0
        self.taken = 0
        try:
            self.owner, self.end = self._scan(path)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.close()
            raise SessionLost(f"{path} cannot be read: {error}") from error
        except BaseException:
            self.close()
            raise

    def _scan(self, path: Path) -> tuple[SessionIdentity, int]:
        size = path.stat().st_size
        if self._file.read(len(_MAGIC)) != _MAGIC:
            raise SessionLost(f"{path} is no journal of a session")
        owner: SessionIdentity | None = None
        end = len(_MAGIC)
        for place in self._records.places(end, size):
            start, kind = place.start, place.kind
            end = start + place.size
            if kind in (FRAME, _PART):
                self._frames.append(start)
                self.taken += 1
                self.tried = 0
            elif kind == _TRIED:
                self.tried = 0 if self._records.head(start) else self.tried + 1
            elif kind == _KEPT:
                self._kept.append(start)
            elif kind in KINDS:
                self.tried = 0
                self.transfers.note(kind, start, self._records.head(start))
            elif kind == _SNAPSHOT:
                self._base_at = start
                self.base = _headers.decode(self._read_at(start).head)
                self.taken = self.base.taken
            else:
                data = self._records.head(start)
                if kind == _HEADER:
                    owner = _identities.decode(data)
                elif kind == _CUT:
                    submission, op, reason = read_cut(data)
                    self.cuts[submission] = op, reason
                elif kind == _SHORT:
                    submission, op, reason = read_cut(data)
                    self.short.setdefault(submission, {})[op] = reason
                else:
                    self._notes.append(data)
        if owner is None:
            raise SessionLost(f"{path} does not say whose session it was")
        return owner, end

    def is_at(self, path: Path) -> bool:
        """True if the file at a path is this journal, and no later one."""
        return os.path.samestat(path.stat(), os.fstat(self._file.fileno()))

    @property
    def over(self) -> bool:
        """True if all frames were replayed: later ones come from the client."""
        return not self._frames

    def next_frame(self) -> Frame:
        """The next received frame."""
        return self._read_at(self._frames.popleft())

    def kept(self) -> list[Frame]:
        """Unacknowledged replies at the snapshot, oldest first."""
        return [self._read_at(start) for start in self._kept]

    def memory(self) -> Sequence[memoryview]:
        """The memory of the snapshot."""
        memory = [memoryview(buffer) for buffer in self._read_at(self._base_at).body]
        for position, part in self.map_files():
            memory.insert(position, part)
        return memory

    def map_files(self) -> Sequence[tuple[int, memoryview]]:
        """The parts of that memory that are in files of their own, by position; from then on they are there even if the files are not."""
        if self._mapped is None:
            found = sorted(self.base.elsewhere) if self.base is not None else ()
            self._mapped = [(position, mapped(self._contents, digest)) for position, digest in found]
        return self._mapped

    def _read_at(self, start: int) -> Frame:
        try:
            kind, head, body = self._records.read(start)
        except ProtocolError as error:
            raise SessionLost(f"a journal cannot be read: {error}") from error
        frame = Frame(head, body)
        if kind != _PART:
            return frame
        try:
            return read_part(self._contents, _blobs.decode(frame.head))
        except msgspec.MsgspecError as error:
            raise SessionLost(f"a journal refers to bytes elsewhere in a way that cannot be read: {error}") from error

    @property
    def note(self) -> bytes | None:
        """The note that `next_note` returns next."""
        return self._notes[0] if self._notes else None

    def next_note(self) -> bytes | None:
        """The next decision noted in the journal; None if the process ended before it was made."""
        return self._notes.popleft() if self._notes else None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _open_locked(path: Path) -> int:
    """Open or create the file of a journal, and lock it.

    Raises:
        OSError: the file cannot be opened, or another process holds its lock.
    """
    file = os.open(path, os.O_CREAT | os.O_RDWR | NOFOLLOW | CLOEXEC, 0o600)
    try:
        lock_file(file)
    except OSError:
        os.close(file)
        raise
    return file


def owner_of(path: Path) -> SessionIdentity:
    """The identity of the session of the journal at `path`; nothing else of it is read.

    Raises:
        SessionLost: there is no journal, or it is not valid.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise SessionLost(f"{path} is no journal of a session")
            records = RecordReader(file)
            first = next(records.places(len(_MAGIC), len(_MAGIC) + _OWNER_LIMIT), None)
            if first is None or first.kind != _HEADER:
                raise SessionLost(f"{path} does not say whose session it was")
            return _identities.decode(records.head(first.start))
    except (OSError, struct.error, msgspec.MsgspecError) as error:
        raise SessionLost(f"the session left no journal that can be read: {error}") from None


def read_cut(data: bytes) -> tuple[int, int, str]:
    """A submission that was stopped, before which op, and the device error that was the reason.

    Raises:
        SessionLost: that is no such record.
    """
    if len(data) < _CUT_AT.size:
        raise SessionLost("a journal contradicts itself: it does not say where a program was stopped")
    return *_CUT_AT.unpack_from(data), data[_CUT_AT.size :].decode(errors="replace")


def remove_stale(directory: Path) -> None:
    """Remove journals that no process writes and no client has come back for in `STALE_SECONDS`, and unfinished compactions (`.new`)."""
    for path in (*directory.glob("*.journal"), *directory.glob("*.new")):
        try:
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                Journal(path, _NO_SESSION, 0, DiskQuota()).end()
        except OSError as error:
            _log.debug("a journal stays", path=str(path), reason=str(error))
    for folder in directory.glob("*.contents"):
        if not folder.with_suffix(".journal").exists():
            remove_contents(folder)


def journal_path(directory: Path, session: str) -> Path | None:
    """Path of a session's journal; None if `session` is not a valid name."""
    plain = session.replace("-", "").replace("_", "")
    return directory / f"{session}.journal" if plain.isascii() and plain.isalnum() and len(session) <= 64 else None
