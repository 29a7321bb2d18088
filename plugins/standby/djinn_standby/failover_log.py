"""Failover log of a session: frames that were sent, checksums of replies, and periodic snapshots.

A server that receives these frames reaches the same state. The log file begins with the latest snapshot.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import time
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.logs import get_logger
from djinn_core.protocol.delivery.record_log import RecordReader, RecordWriter
from djinn_core.protocol.delivery.snapshot_schedule import SnapshotSchedule, reply_checksum
from djinn_core.system.directories import cache_directory
from djinn_core.wire.cancel_messages import RepeatOutcome
from djinn_core.wire.frames import Frame
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import Completed, Submit, decode, encode, expect, is_of_kind
from djinn_core.wire.numeric_messages import NumericSettings
from djinn_core.wire.state_messages import StateChunk, StateHeader, count_pieces

_FRAME: Final = b"F"  # the kind of all records
_REPLIES: Final = struct.Struct("<Q")  # number of replies received before a frame; precedes the frame's head
_SPARE: Final = 4  # a log uses at most 1 / _SPARE of the free disk space, and a compacted log exists twice for a moment
_log = get_logger("djinn.session")


def folder() -> Path | None:
    """Return the directory for log files in the user's cache, or None (the system's default) if it cannot be created."""
    path = cache_directory()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return path


class SentFrames:
    """Log of sent frames in an unlinked file, which the system removes with this process. Not thread-safe.

    Attributes:
        limit: maximum bytes of the file.
    """

    def __init__(self, limit: int) -> None:
        """Create an empty file. It may use at most `limit` bytes, and at most a quarter of the free disk space.

        Raises:
            OSError: the file cannot be created.
        """
        with tempfile.TemporaryFile(dir=folder(), buffering=0) as file:
            self._file = os.dup(file.fileno())
        self._finalizer = weakref.finalize(self, os.close, self._file)
        free = shutil.disk_usage(folder() or tempfile.gettempdir()).free
        self.limit = min(limit, free // _SPARE)
        self._records = RecordWriter(self._file, 0, self.limit)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the frames in the file."""
        return self._records.size

    def append(self, frame: Frame, replies: int) -> None:
        """Write a frame. `replies`: number of replies received before it.

        Raises:
            OSError: the frame exceeds the limit, or the disk is full.
        """
        self._records.append(_FRAME, _REPLIES.pack(replies) + frame.head, frame.body)

    def read(self) -> Iterator[tuple[int, Frame]]:
        """Yield the frames in order, as (number of replies that were received before the frame was sent, frame).

        Raises:
            TransportError: the file does not contain the bytes that were written.
        """
        with open(self._file, "rb", closefd=False) as file:
            reader = RecordReader(file)
            try:
                for place in reader.locations(0, self.nbytes):
                    _, head, body = reader.read(place.start)
                    (replies,) = _REPLIES.unpack_from(head)
                    yield replies, Frame(head[_REPLIES.size :], body)
            except (ProtocolError, struct.error) as error:
                raise TransportError(f"the file of sent frames has changed: {error}") from error

    def close(self) -> None:
        """Close the file, which frees its disk space."""
        self._finalizer()


class SnapshotReceiver:
    """Receives a snapshot of the session, as frames for another executor.

    Attributes:
        frames: frames of the snapshot so far, or None after `drop`.
        reason: why the server sent no snapshot, or empty.
        is_interrupted: True if a message other than a reply arrived. The executor then waits for the client before the snapshot.
    """

    def __init__(self, frames: SentFrames) -> None:
        self.frames: SentFrames | None = frames
        self.reason = ""
        self.is_interrupted = False
        self._missing_pieces: int | None = None

    def take(self, frame: Frame, message: Message) -> bool:
        """Store a frame of the snapshot. Return False for all other frames.

        Raises:
            OSError: the frame does not fit on the disk.
        """
        if isinstance(message, StateHeader):
            self._missing_pieces, self.reason = count_pieces(message.lengths), message.reason
        elif isinstance(message, StateChunk) and self._missing_pieces:
            self._missing_pieces -= 1
        else:
            self.is_interrupted |= not isinstance(message, Completed)
            return False
        if self.frames is not None:
            self.frames.append(frame, 0)
        return True

    @property
    def is_complete(self) -> bool:
        """Return True if the snapshot is complete."""
        return self._missing_pieces == 0

    def drop(self) -> None:
        """Discard the snapshot, and ignore its further frames."""
        if self.frames is not None:
            self.frames.close()
            self.frames = None


# The bytes of a frame's head with the kind of message and a submission's number. Times follow them.
_OPENING: Final = slice(1, 14)


def checksum_of(frame: Frame, values: bool) -> int:
    """Return a checksum of the parts of a reply that are equal on all servers. `values`: True to include its values."""
    opening = zlib.crc32(frame.head[_OPENING])
    return reply_checksum(frame.body, opening) if values else opening


class ReplyChecksums:
    """Checksums of the received replies, in order.

    Attributes:
        rounded: True if servers may round values differently, because the client does not need exact results. Then
            checksums exclude values.
    """

    def __init__(self) -> None:
        self.rounded = False
        self._exact = 0  # number of replies whose checksum includes values
        self._marks = array("L")

    def __len__(self) -> int:
        return len(self._marks)

    def take(self, frame: Frame) -> None:
        """Add the checksum of a reply."""
        self._exact += not self.rounded
        self._marks.append(checksum_of(frame, not self.rounded))

    def agrees(self, position: int, frame: Frame) -> bool:
        """Return True if the reply at `position` has the same checksum as `frame`."""
        return self._marks[position] == checksum_of(frame, position < self._exact)

    def clear(self) -> None:
        """Discard all checksums, because a snapshot includes the effects of the replies."""
        self._exact = 0
        del self._marks[:]


class FailoverLog:
    """Log of a session since its beginning or its latest snapshot: sent frames, and checksums of replies.

    Attributes:
        sent: the sent frames, or None if they cannot be logged any more.
        replies: checksums of received replies.
        obstacle: why no standby server can continue the session, or empty if one can.
        outcomes: outcomes of submissions that were stopped or ran out of memory, by number. A replay repeats them.
        base: bytes of the snapshot with which `sent` begins.
        requested_snapshot: the requested snapshot, or None if none is pending.
    """

    def __init__(self, limit: int) -> None:
        """Create an empty log. `limit`: maximum bytes of the log.

        Raises:
            OSError: the log file cannot be created.
        """
        self.sent: SentFrames | None = SentFrames(limit)
        self.replies = ReplyChecksums()
        self.outcomes: dict[int, RepeatOutcome] = {}
        self.obstacle = ""
        self.base = 0
        self.requested_snapshot: SnapshotReceiver | None = None
        self._limit = self.sent.limit
        self._schedule = SnapshotSchedule()
        self._was_reported = False

    def record_sent(self, frame: Frame) -> None:
        """Log a frame that will be sent."""
        if self.sent is None:
            return
        if is_of_kind(frame.head, NumericSettings) and not expect(frame.head, NumericSettings).exact:
            self.replies.rounded = True
        try:
            self.sent.append(frame, len(self.replies))
        except OSError as error:
            self._stop_logging(f"the log of sent frames cannot be written ({error.strerror})")

    def _stop_logging(self, reason: str) -> None:
        """Close the log, after which no standby server can continue the session."""
        _log.warning("no standby server can continue this session any more", reason=reason)
        self.obstacle = reason
        self.close()
        self.replies.clear()

    def record_received(self, frame: Frame) -> bool:
        """Log a received frame. Return False for a part of a snapshot, True for all other frames."""
        if self.requested_snapshot is not None and self._receive_snapshot(frame, self.requested_snapshot):
            return False
        if self.sent is not None:
            self.replies.take(frame)
            if is_of_kind(frame.head, Completed):
                completed = expect(frame.head, Completed)
                if completed.stopped_at is not None or completed.shortages:
                    self.outcomes[completed.sequence] = RepeatOutcome(
                        completed.sequence, completed.stopped_at, completed.shortages
                    )
        return True

    def frames(self) -> Iterator[tuple[int, Frame]]:
        """Yield the frames as `SentFrames.read` does, with the outcome of a submission before the submission.

        Raises:
            TransportError: the file does not contain the bytes that were written.
        """
        assert self.sent is not None
        for replies, frame in self.sent.read():
            if self.outcomes and is_of_kind(frame.head, Submit):
                outcome = self.outcomes.get(expect(frame.head, Submit).sequence)
                if outcome is not None:
                    yield replies, Frame(encode(outcome))
            yield replies, frame

    # --- a new beginning ---------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Return True if a snapshot should be requested now."""
        if self.sent is None or self.requested_snapshot is not None:
            return False
        return self._schedule.is_due(large=self.sent.nbytes > max(self._limit // 2, 2 * self.base))

    def compact(self, ask: Callable[[SnapshotReceiver, int], None]) -> None:
        """Replace the log by a snapshot. `ask`: function that requests a snapshot of at most so many bytes and waits for it."""
        start = time.monotonic()
        reason = ""
        try:
            self.requested_snapshot = requested_snapshot = SnapshotReceiver(SentFrames(self._limit))
        except OSError as error:
            reason = str(error)
            self._warn_once(reason)
        else:
            try:
                ask(requested_snapshot, self._limit // 2)
            finally:
                reason = requested_snapshot.reason
        finally:
            self._schedule.record_snapshot(start, failed=bool(reason))

    def _receive_snapshot(self, frame: Frame, requested_snapshot: SnapshotReceiver) -> bool:
        """Store a frame of the snapshot. Return False for all other frames. The last frame replaces the log."""
        try:
            if not requested_snapshot.take(frame, decode(frame.head)):
                return False
        except OSError as error:
            _log.warning("a snapshot of the session cannot be written to the log", reason=str(error))
            requested_snapshot.drop()
        if requested_snapshot.is_complete:
            self.requested_snapshot = None
            frames = requested_snapshot.frames
            if requested_snapshot.reason:
                self._warn_once(requested_snapshot.reason)
            elif frames is not None and self.sent is not None:
                requested_snapshot.frames = None
                self.sent.close()
                self.sent, self.base = frames, frames.nbytes
                self.replies.clear()
                self.outcomes.clear()
        return True

    def _warn_once(self, reason: str) -> None:
        tell = _log.debug if self._was_reported else _log.warning
        tell("the failover log grows, because it has no new snapshot", reason=reason)
        self._was_reported = True

    def drop_snapshot(self) -> None:
        """Discard the requested snapshot, because it cannot arrive any more."""
        if self.requested_snapshot is not None:
            self.requested_snapshot.drop()
            self.requested_snapshot = None

    def close(self) -> None:
        """Close and discard the log."""
        if self.sent is not None:
            self.sent.close()
            self.sent = None
