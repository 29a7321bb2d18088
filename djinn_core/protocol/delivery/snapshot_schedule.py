"""Schedule of the snapshots to which a log of a session is compacted, and the checksum by which its replay is compared."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Final

from djinn_core.wire.frames import Buffer, flatten

SNAPSHOT_SECONDS: Final = 20.0  # shortest time between snapshots; a crash replays what came since the last one
PAUSE_FACTOR: Final = 20  # shortest pause after a snapshot, as a multiple of the time that it took
CHECKED_BYTES: Final = 64 << 10  # of every reply, that a replay compares by checksum


class SnapshotSchedule:
    """Decides when a snapshot is due: some seconds after the last one, sooner if the log is large, and after a pause in any case.

    Attributes:
        due, due_if_large: the time of the next one, on the clock `time.monotonic`.
    """

    def __init__(self, seconds: float | None = None, seconds_if_large: float = 0.0) -> None:
        """`seconds`: between snapshots (None: `SNAPSHOT_SECONDS`); `seconds_if_large`: where the log is large."""
        self._seconds = SNAPSHOT_SECONDS if seconds is None else seconds
        self._seconds_if_large = min(self._seconds, seconds_if_large)
        self.due = time.monotonic() + self._seconds
        self.due_if_large = 0.0

    def is_due(self, *, large: bool) -> bool:
        """True if a snapshot is due for a log that is `large` or not."""
        return time.monotonic() >= (self.due_if_large if large else self.due)

    def taken(self, started: float, *, failed: bool = False) -> None:
        """Note that a snapshot which began at `started` has ended; after one that `failed`, the next one is not made sooner because the log is large."""
        ended = time.monotonic()
        pause = PAUSE_FACTOR * (ended - started)
        self.due = ended + max(self._seconds, pause)
        self.due_if_large = self.due if failed else ended + max(self._seconds_if_large, pause)


def reply_checksum(body: Sequence[Buffer], start: int = 0) -> int:
    """Checksum of a reply's body, going on from the checksum `start`."""
    if not body:
        return start
    first = body[0]
    return zlib.crc32((first if type(first) is bytes else flatten(first))[:CHECKED_BYTES], start)
