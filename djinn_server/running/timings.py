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
        self._found: dict[int, tuple[Any, Any]] = {}

    def begin(self) -> Any:
        """Return the current time of the device's clock. Called before each instruction."""
        return self._timer.mark()

    def end(self, instruction: int, begun: Any) -> None:
        """Record the end of an instruction that began at moment `begun`."""
        self._found[instruction] = begun, self._timer.mark()

    def packed(self, instructions: int) -> bytes:
        """Wait for the last instruction, and return all times in the format of `ExecutionTimes.ops`."""
        recorded = self._found
        if recorded:
            self._timer.wait(recorded[max(recorded)][1])
        pairs = [self._seconds(*recorded[i]) if i in recorded else _UNKNOWN for i in range(instructions)]
        return b"".join([_PAIR.pack(*pair) for pair in pairs])

    def _seconds(self, begun: Any, ended: Any) -> tuple[float, float]:
        return self._timer.seconds(self._began, begun), self._timer.seconds(begun, ended)


class Timings:
    """Times of a session's submissions and transfers, which its client requested.

    Attributes:
        ops: True if each instruction is timed.
    """

    def __init__(self, instance: str, *, ops: bool) -> None:
        self.ops = ops
        self._instance = instance
        self._transfers: list[TransferTimes] = []

    def transferred(self, transfer: int, peer: int, begun: float, sizes: Iterable[int], *, incoming: bool) -> None:
        """Record a transfer that has just ended. Transfers beyond the limit are not recorded."""
        if len(self._transfers) < TRANSFERS_TOLD:
            times = TransferTimes(transfer, peer, incoming, begun, time.perf_counter(), sum(sizes))
            self._transfers.append(times)

    def times(self, moments: Mapping[str, float], memory: int, ops: bytes) -> ExecutionTimes:
        """Return the times of a submission, and of the transfers since the previous submission."""
        transfers, self._transfers = tuple(self._transfers), []
        return ExecutionTimes(self._instance, **moments, memory=memory, ops=ops, transfers=transfers)
