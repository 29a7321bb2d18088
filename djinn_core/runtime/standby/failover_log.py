"""Failover log of a session: the frames that were sent, checksums of the responses, and periodic snapshots."""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Callable
from typing import Final

from djinn_core.delivery.snapshot_schedule import SnapshotSchedule, answer_checksum
from djinn_core.logs import get_logger
from djinn_core.runtime.standby.frame_log import SentFrames
from djinn_core.runtime.standby.snapshot_receiver import SnapshotReceiver
from djinn_core.wire.frames import Frame
from djinn_core.wire.messages import decode

# Of a frame's head: the kind of message, and a submission's number. What comes after it has times in it.
_OPENING: Final = slice(1, 14)


def mark_of(frame: Frame) -> int:
    """A checksum of what does not differ from server to server."""
    return answer_checksum(frame.body, zlib.crc32(frame.head[_OPENING]))


class AnswerChecksums:
    """The answers that were taken, in order, as checksums."""

    def __init__(self) -> None:
        self._marks = array("L")

    def __len__(self) -> int:
        return len(self._marks)

    def take(self, frame: Frame) -> None:
        """One more."""
        self._marks.append(mark_of(frame))

    def agrees(self, position: int, frame: Frame) -> bool:
        """True if the answer at a position had the same checksum as `frame`."""
        return self._marks[position] == mark_of(frame)

    def clear(self) -> None:
        """They need not be given again."""
        del self._marks[:]


_SPARE: Final = 4  # of what is free on the disk, one part at most; a log that is compacted is there twice for a moment
_log = get_logger("djinn.session")


class FailoverLog:
    """Frames that were sent, since the beginning or since the state that they begin with.

    Attributes:
        sent: the frames; None once there are too many.
        answers: those that were taken.
        why_not: why another server cannot take the session over now.
        base: bytes of the state that `sent` begins with.
        coming: a state that was asked for.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: bytes that may be logged.

        Raises:
            OSError: nothing can be logged.
        """
        self.sent: SentFrames | None = SentFrames()
        self.answers = AnswerChecksums()
        self.why_not = ""
        self.base = 0
        self.coming: SnapshotReceiver | None = None
        self._limit = min(limit, self.sent.room // _SPARE)
        self._schedule = SnapshotSchedule()
        self._said = False

    def write_down(self, frame: Frame) -> None:
        """A frame is sent."""
        if self.sent is None:
            return
        try:
            self.sent.append(frame, len(self.answers))
        except OSError as error:
            self._give_up(f"what is sent cannot be logged: {error}")
        else:
            if self.sent.nbytes > self._limit:
                self._give_up(f"what was sent has more than {self._limit:,} bytes")

    def _give_up(self, reason: str) -> None:
        """The session cannot go on with another server from now on."""
        _log.warning("no standby server can take this session over any more", reason=reason)
        self.why_not = reason
        self.close()
        self.answers.clear()

    def take(self, frame: Frame) -> bool:
        """A frame has come; whether it is an answer, and not a part of a state."""
        if self.coming is not None and self._take_state(frame, self.coming):
            return False
        if self.sent is not None:
            self.answers.take(frame)
        return True

    # --- a new beginning ---------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """True if a snapshot is due."""
        if self.sent is None or self.coming is not None:
            return False
        return self._schedule.is_due(large=self.sent.nbytes > max(self._limit // 2, 2 * self.base))

    def compact(self, ask: Callable[[SnapshotReceiver, int], None]) -> None:
        """Have `ask` request a snapshot of limited size and wait for it; an incomplete one is thrown away."""
        started = time.monotonic()
        reason = ""
        try:
            self.coming = coming = SnapshotReceiver(SentFrames())
        except OSError as error:
            reason = str(error)
            self._say_once(reason)
        else:
            try:
                ask(coming, self._limit // 2)
            finally:
                reason = coming.reason
        finally:
            self._schedule.taken(started, failed=bool(reason))

    def _take_state(self, frame: Frame, coming: SnapshotReceiver) -> bool:
        """Take a part of the snapshot that comes; false for other frames. With the last part, the log is compacted."""
        try:
            if not coming.take(frame, decode(frame.head)):
                return False
        except OSError as error:
            _log.warning("a state does not fit on this machine", reason=str(error))
            coming.drop()
        if coming.over:
            self.coming = None
            frames = coming.frames
            if coming.reason:
                self._say_once(coming.reason)
            elif frames is not None and self.sent is not None:
                coming.frames = None
                self.sent.close()
                self.sent, self.base = frames, frames.nbytes
                self.answers.clear()
                self.why_not = ""
        return True

    def _say_once(self, reason: str) -> None:
        tell = _log.debug if self._said else _log.warning
        tell("what a standby server would do again grows: no state to begin with", reason=reason)
        self._said = True

    def drop_state(self) -> None:
        """Drop the snapshot that was asked for: it does not come any more."""
        if self.coming is not None:
            self.coming.drop()
            self.coming = None

    def close(self) -> None:
        """Keep nothing any more."""
        if self.sent is not None:
            self.sent.close()
            self.sent = None
