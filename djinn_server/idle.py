"""Idle sessions: their values leave the device, and each value is restored at its next use."""

from __future__ import annotations

import math
import time

from djinn_core.logs import get_logger
from djinn_server.context import ExecutorContext
from djinn_server.memory.session_memory import SessionMemory

_log = get_logger("djinn.server")


class IdleMoves:
    """Move the values of a session off its device while it is idle. Only the session's thread uses it.

    Attributes:
        at: time of the next move; None before the session pauses.
    """

    def __init__(self, context: ExecutorContext, memory: SessionMemory | None) -> None:
        """`memory`: the session's memory; None if the device does not evict values, so that nothing moves."""
        self._context = context
        self._memory = memory
        self.at: float | None = None

    def deadline(self) -> float | None:
        """Return when the values move next; None: never. If that time has come, move them."""
        seconds, memory = self._context.idle_seconds, self._memory
        if not seconds or memory is None:
            return None
        now = time.monotonic()
        if self.at is None:
            self.at = now + seconds
        elif now >= self.at:
            with self._context.moving:
                moved = memory.move_away()
            _log.info("the values of an idle session left the device", **moved)
            self._context.trimmer.soon()
            self.at = now + seconds if memory.moves_again else math.inf
        return self.at if self.at < math.inf else None
