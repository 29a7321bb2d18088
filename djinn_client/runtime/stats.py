"""Counters of captured, sent, received and awaited work of this process."""

from __future__ import annotations

import msgspec

from djinn_core.logs import get_logger
from djinn_core.wire.messages import PRESSURE, Timing

_log = get_logger("djinn.runtime")


class Stats(msgspec.Struct):
    """Counts since the start or the last reset. Sizes are in bytes, counted at the sockets.

    The fields `server_..._us` split the server's time in microseconds, as its replies report it (`Timing`).

    Attributes:
        instructions_sent: instructions in sent programs.
        submissions: sent submissions.
        round_trips: waits of the program for the executor.
        templates_sent: submissions that contained a template.
        templates_reused: submissions that named a cached template.
        plans_made: plans of programs.
        plans_reused: programs for which a plan existed.
        client_fallbacks: ops that ran on this machine because the executor lacks them.
        optimizations_tried: A/B tests of optimizations.
        optimizations_switched_off: tested optimizations that were slower.
        placements_tried: programs that ran over several executors as a trial.
        placements_switched_off: trials after which the program returned to one executor.
        plans_for_sizes: plans in `plans_made` for a known program with sizes outside the range of its plans.
        messages_sent: sent messages, without messages that open connections or acknowledge frames.
        messages_received: received messages, counted like `messages_sent`.
        bytes_uploaded: bytes of tensor data in the sent bytes.
        bytes_recalled: bytes of tensor data that the server had already.
        bytes_read: bytes of tensor data that the server read itself.
        server_queue_us: time of waiting for other sessions.
        server_decode_us: time of decoding submissions.
        server_execute_us: time of running submissions.
        server_encode_us: time of encoding results.
        memory_pressure: the executor's state in the last reply: 0 enough memory, 1 nearly full, 2 evicted values.
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
        """Record the server's time from a reply."""
        self.server_queue_us += int(timing.queue * 1e6 + 0.5)
        self.server_decode_us += int(timing.decode * 1e6 + 0.5)
        self.server_execute_us += int(timing.execute * 1e6 + 0.5)
        self.server_encode_us += int(timing.encode * 1e6 + 0.5)
        if timing.pressure != self.memory_pressure:
            self._set_memory_pressure(timing.pressure)

    def _set_memory_pressure(self, level: int) -> None:
        if level > self.memory_pressure:
            _log.warning("the executor's memory is short", pressure=PRESSURE[min(level, len(PRESSURE) - 1)])
        self.memory_pressure = level
