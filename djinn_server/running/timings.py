"""Timings of a session's work, kept while its client asks for them: when submissions, their instructions and transfers ran."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping
from typing import Any

from djinn_core.hookspecs.devices import DeviceRuntime
from djinn_core.wire.timing_messages import TRANSFERS_TOLD, ExecutionTimes, TransferTimes

_PAIR = struct.Struct("<ff")
_UNKNOWN = (-1.0, -1.0)


class OpTimes:
    """Times of the instructions of one run.

    On a device that works beside the processor (a GPU), events on its stream are the times, and `packed` waits for the last one.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = None if runtime.device.type == "cpu" else runtime
        self._began = self._mark()
        self._found: dict[int, tuple[Any, Any]] = {}

    def _mark(self) -> Any:
        return time.perf_counter() if self._runtime is None else self._runtime.mark(timing=True)

    def begin(self) -> Any:
        """The moment before an instruction."""
        return self._mark()

    def end(self, instruction: int, begun: Any) -> None:
        """Note the moment after it."""
        self._found[instruction] = begun, self._mark()

    def packed(self, instructions: int) -> bytes:
        """As `ExecutionTimes.ops`."""
        found = self._found
        if self._runtime is not None and found:
            found[max(found)][1].synchronize()
        pairs = [self._seconds(*found[i]) if i in found else _UNKNOWN for i in range(instructions)]
        return b"".join([_PAIR.pack(*pair) for pair in pairs])

    def _seconds(self, begun: Any, ended: Any) -> tuple[float, float]:
        if self._runtime is None:
            return begun - self._began, ended - begun
        return self._began.elapsed_time(begun) / 1e3, begun.elapsed_time(ended) / 1e3  # events count in milliseconds


class Timings:
    """Moments of a session's work, which it tells its client.

    Attributes:
        ops: whether each instruction is timed.
    """

    def __init__(self, instance: str, *, ops: bool) -> None:
        self.ops = ops
        self._instance = instance
        self._transfers: list[TransferTimes] = []

    def transferred(self, transfer: int, peer: int, begun: float, sizes: Iterable[int], *, incoming: bool) -> None:
        """Note a transfer that ends now; one that is too many is left out."""
        if len(self._transfers) < TRANSFERS_TOLD:
            times = TransferTimes(transfer, peer, incoming, begun, time.perf_counter(), sum(sizes))
            self._transfers.append(times)

    def times(self, moments: Mapping[str, float], memory: int, ops: bytes) -> ExecutionTimes:
        """The times of a submission, with those of the transfers before it."""
        transfers, self._transfers = tuple(self._transfers), []
        return ExecutionTimes(self._instance, **moments, memory=memory, ops=ops, transfers=transfers)
