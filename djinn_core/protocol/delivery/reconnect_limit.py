"""Retry limit: reconnecting stops after several breaks without progress."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

STARTING_SECONDS: Final = 60.0  # that clients and other executors allow an executor to start
BREAKS_LIMIT: Final = 10  # connections in a row that break before a frame is received


class ReconnectLimit:
    """Counts connections in a row that broke without progress: after `BREAKS_LIMIT`, the frames that are sent are taken for the cause."""

    def __init__(self, progress: Hashable = 0) -> None:
        """`progress`: the numbers of what was received so far."""
        self._progress = progress
        self._breaks = 0

    def record_break(self, progress: Hashable) -> bool:
        """Record a broken connection. `progress`: as above, by now. True: reconnecting should stop."""
        self._breaks = self._breaks + 1 if progress == self._progress else 0
        self._progress = progress
        return self._breaks > BREAKS_LIMIT
