"""Schedule of session snapshots, which compact a session's log, and the checksum that verifies its replay."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Final

from djinn_core.wire.frames import Buffer, flatten

SNAPSHOT_SECONDS: Final = 20.0  # minimum seconds between snapshots; a crash replays everything since the last one
PAUSE_FACTOR: Final = 20  # minimum pause after a snapshot, as a multiple of its duration
CHECKED_BYTES: Final = 64 << 10  # bytes of every reply that a replay compares by checksum


class SnapshotSchedule:
    """Decide when a snapshot is due: some seconds after the last snapshot, or sooner if the log is large.

    Attributes:
        due: time of the next snapshot (`time.monotonic`).
        due_if_large: time of the next snapshot if the log is large.
    """

    def __init__(self, seconds: float | None = None, seconds_if_large: float = 0.0) -> None:
        """Start a schedule.

        `seconds` is the interval between snapshots; None stands for `SNAPSHOT_SECONDS`. `seconds_if_large` is the
        interval for a large log.
        """
        self._seconds = SNAPSHOT_SECONDS if seconds is None else seconds
        self._seconds_if_large = min(self._seconds, seconds_if_large)
        self.due = time.monotonic() + self._seconds
        self.due_if_large = 0.0

    def is_due(self, *, large: bool) -> bool:
        """Return True if a snapshot is due. Set `large` if the log is large."""
        return time.monotonic() >= (self.due_if_large if large else self.due)

    def record_snapshot(self, started: float, *, failed: bool = False) -> None:
        """Record the end of a snapshot that began at `started`.

        After a failed snapshot, a large log does not make the next snapshot earlier.
        """
        now = time.monotonic()
        pause = PAUSE_FACTOR * (now - started)
        self.due = now + max(self._seconds, pause)
        self.due_if_large = self.due if failed else now + max(self._seconds_if_large, pause)


def reply_checksum(body: Sequence[Buffer], start: int = 0) -> int:
    """Return the checksum of a reply's body, continued from `start`."""
    if not body:
        return start
    first = body[0]
    return zlib.crc32((first if type(first) is bytes else flatten(first))[:CHECKED_BYTES], start)
