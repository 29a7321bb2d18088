"""Retry limit: reconnecting stops after several breaks without progress."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

STARTING_SECONDS: Final = 60.0  # that clients and other executors allow an executor to start
BREAKS_LIMIT: Final = 10  # connections that broke before anything was received over them


class ReconnectLimit:
    """Counts connections in a row that broke without progress: after many, the frames that are sent are taken for the cause."""

    def __init__(self, made: Hashable = 0) -> None:
        """`made`: positions of both ends at the beginning."""
        self._made = made
        self._in_vain = 0

    def record_break(self, made: Hashable) -> bool:
        """Record a broken connection, with the positions of both ends; True if reconnecting should stop."""
        self._in_vain = self._in_vain + 1 if made == self._made else 0
        self._made = made
        return self._in_vain > BREAKS_LIMIT
