"""Start and end times of a session's submissions, instructions and transfers, recorded if its client requests them."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping
from typing import Any

from djinn_core.wire.timing_messages import TRANSFERS_TOLD, ExecutionTimes, TransferTimes
from djinn_server.running.device_time import DeviceTimer

_PAIR = struct.Struct("<ff")
_UNKNOWN = (-1.0, -1.0)


class OpTimes:
    """Times of the instructions of one run, by the device's clock."""

    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer
        self._began = timer.mark()
        self._op_moments: dict[int, tuple[Any, Any]] = {}

    def begin(self) -> Any:
        """Return the current moment of the device's clock, before an instruction."""
        return self._timer.mark()

    def end(self, instruction: int, start: Any) -> None:
        """Record that an instruction began at moment `start` and ends now. `instruction`: its number."""
        self._op_moments[instruction] = start, self._timer.mark()

    def pack(self, instructions: int) -> bytes:
        """Wait for the last instruction, and return the times of all instructions, as in `ExecutionTimes.ops`.

        `instructions`: number of instructions of the template.
        """
        moments_by_op = self._op_moments
        if moments_by_op:
            self._timer.wait(moments_by_op[max(moments_by_op)][1])
        pairs = [self._seconds(*moments_by_op[i]) if i in moments_by_op else _UNKNOWN for i in range(instructions)]
        return b"".join([_PAIR.pack(*pair) for pair in pairs])

    def _seconds(self, start: Any, end: Any) -> tuple[float, float]:
        return self._timer.seconds(self._began, start), self._timer.seconds(start, end)


class Timings:
    """Times of a session's submissions and transfers, which its client requested.

    Attributes:
        ops: True if each instruction is timed.
    """

    def __init__(self, instance: str, *, ops: bool) -> None:
        """`instance`: id of this executor process. `ops`: as the attribute."""
        self.ops = ops
        self._instance = instance
        self._transfers: list[TransferTimes] = []

    def add_transfer(self, transfer: int, peer: int, start: float, sizes: Iterable[int], *, incoming: bool) -> None:
        """Record a transfer that has just ended. Transfers beyond the limit are not recorded.

        Args:
            transfer: number of the transfer.
            peer: number of the other executor.
            start: time (`time.perf_counter`) at which the transfer began.
            sizes: bytes of each value.
            incoming: True if this executor receives the values.
        """
        if len(self._transfers) < TRANSFERS_TOLD:
            times = TransferTimes(transfer, peer, incoming, start, time.perf_counter(), sum(sizes))
            self._transfers.append(times)

    def times(self, moments: Mapping[str, float], memory: int, ops: bytes) -> ExecutionTimes:
        """Return the times of a submission, and of the transfers since the previous submission.

        Args:
            moments: `taken`, `ready`, `begun`, `executed` and `done` of `ExecutionTimes`.
            memory: bytes of the session's values.
            ops: times of the instructions, as `OpTimes.pack` returns them; empty if they were not timed.
        """
        transfers, self._transfers = tuple(self._transfers), []
        return ExecutionTimes(self._instance, **moments, memory=memory, ops=ops, transfers=transfers)
