"""Counters of what this process has captured, sent, received and waited for."""

from __future__ import annotations

import msgspec

from djinn_core.logs import get_logger
from djinn_core.wire.messages import PRESSURE, Timing

_log = get_logger("djinn.runtime")


class Stats(msgspec.Struct):
    """Counts since the start or the last reset; sizes in bytes.

    `client_fallbacks` are ops that were computed on this machine because the executor cannot do them. `optimizations_tried`
    were left out of some runs to see whether they pay, and `optimizations_switched_off` did not;
    `placements_tried` are programs that ran over several executors to see whether that pays, `placements_switched_off` those that
    went back to one.
    `plans_for_sizes` are those of `plans_made` that a known program needed because its sizes had left the range of its plans.
    `messages_sent` and `messages_received` exclude messages that open connections or acknowledge frames.
    Bytes are those of the connections, taken where they meet the socket; `bytes_uploaded` is the tensor data in them,
    `bytes_recalled` what the server had already, `bytes_read` what it read itself at an address. `server_..._us` is where the server's time went, in microseconds, as its
    replies say (`Timing`): waiting for other sessions, reading submissions, running them, getting results ready.
    `memory_pressure` is how short the executor's memory was by the last reply: 0 not at all, 1 nearly full, 2 values made room.
    """

    instructions_sent: int = 0
    submissions: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    round_trips: int = 0
    bytes_uploaded: int = 0
    bytes_recalled: int = 0
    bytes_read: int = 0
    templates_sent: int = 0
    templates_reused: int = 0
    plans_made: int = 0
    plans_for_sizes: int = 0
    plans_reused: int = 0
    client_fallbacks: int = 0
    optimizations_tried: int = 0
    optimizations_switched_off: int = 0
    placements_tried: int = 0
    placements_switched_off: int = 0
    server_queue_us: int = 0
    server_decode_us: int = 0
    server_execute_us: int = 0
    server_encode_us: int = 0
    memory_pressure: int = 0

    def spent(self, timing: Timing) -> None:
        """A reply says where the server's time went."""
        self.server_queue_us += int(timing.queue * 1e6 + 0.5)
        self.server_decode_us += int(timing.decode * 1e6 + 0.5)
        self.server_execute_us += int(timing.execute * 1e6 + 0.5)
        self.server_encode_us += int(timing.encode * 1e6 + 0.5)
        if timing.pressure != self.memory_pressure:
            self._press(timing.pressure)

    def _press(self, level: int) -> None:
        if level > self.memory_pressure:
            _log.warning("the executor's memory is short", pressure=PRESSURE[min(level, len(PRESSURE) - 1)])
        self.memory_pressure = level
