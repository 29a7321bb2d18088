"""Progress of the reads of executors, of which observers are told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Protocol

from djinn_client.runtime.deadlines import due
from djinn_client.runtime.observing import Observers
from djinn_core.system.interrupts import interrupt_mask

READING_PATIENCE: Final = (
    0.25  # seconds for which executors, one after the other, may keep their replies about what they still read
)
SHOWN_BYTES: Final = 64 << 20  # of reads, from which on observers are told how far they are


class ReadingSession(Protocol):
    """A session with an executor that reads weights.

    Attributes:
        unread: bytes that it was told to read since they were looked at, where there are observers.
    """

    unread: int

    def left_to_read(self, patience: float) -> int:
        """Bytes that are still to be read; the executor may wait for so many seconds until there are none."""
        ...


def follow_reads(sessions: Sequence[ReadingSession], observers: Observers) -> None:
    """Tell observers how far executors are, until all is read or the program is interrupted; nothing where it is little.

    Raises:
        SessionLost: an executor is gone.
    """
    expected = sum(session.unread for session in sessions)
    if expected < SHOWN_BYTES:
        return
    left = {number: session.unread for number, session in enumerate(sessions) if session.unread}
    for session in sessions:
        session.unread = 0
    until = due()
    while left and not interrupt_mask.pending and (until is None or time.monotonic() < until):
        patience = READING_PATIENCE / len(left)
        for number in list(left):
            with interrupt_mask.uninterruptible:
                left[number] = sessions[number].left_to_read(patience)
        left = {number: bytes_left for number, bytes_left in left.items() if bytes_left}
        observers.tell("reading", done=max(0, expected - sum(left.values())), expected=expected)
