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
        next_move_at: time of the next move (`time.monotonic`); None before the session pauses.
    """

    def __init__(self, context: ExecutorContext, memory: SessionMemory | None) -> None:
        """`memory`: the session's memory; None if the device does not evict values. Then no value moves."""
        self._context = context
        self._memory = memory
        self.next_move_at: float | None = None

    def deadline(self) -> float | None:
        """Move the values if the session has been idle long enough. Return the next move's time, if any."""
        seconds, memory = self._context.idle_seconds, self._memory
        if not seconds or memory is None:
            return None
        now = time.monotonic()
        if self.next_move_at is None:
            self.next_move_at = now + seconds
        elif now >= self.next_move_at:
            with self._context.move_lock:
                counts = memory.evict_idle()
            _log.info("the values of an idle session were moved off the device", **counts)
            self._context.trimmer.soon()
            self.next_move_at = now + seconds if memory.can_move_to_disk else math.inf
        return self.next_move_at if self.next_move_at < math.inf else None
