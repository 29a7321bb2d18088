"""Retry limit: reconnecting stops after several breaks without progress."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

STARTING_SECONDS: Final = 60.0  # seconds that clients and other executors allow an executor to start
BREAKS_LIMIT: Final = 10  # limit of consecutive connections that break before a frame is received


class ReconnectLimit:
    """Count consecutive connections that broke without progress.

    After more than `BREAKS_LIMIT` such breaks, reconnecting stops, because the retransmitted frames may be the cause.
    """

    def __init__(self, progress: Hashable = 0) -> None:
        """Start a count. `progress`: numbers of the frames received so far."""
        self._progress = progress
        self._breaks = 0

    def record_break(self, progress: Hashable) -> bool:
        """Record a broken connection with the current `progress`. Return True if reconnecting should stop."""
        self._breaks = self._breaks + 1 if progress == self._progress else 0
        self._progress = progress
        return self._breaks > BREAKS_LIMIT
