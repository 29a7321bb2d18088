"""Tell a client how much memory its session can use on the device, given the memory of other sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from djinn_core.wire.message_base import Failure
from djinn_core.wire.messages import Room
from djinn_server.hookspecs.devices import DeviceRuntime

REPORT_SECONDS: Final = 1.0  # seconds between two reports
MIN_CHANGE: Final = 1 / 16  # smallest relative change that is reported
OUT_OF_MEMORY: Final = frozenset({"OutOfMemoryError", "MemoryError"})
_ALLOCATORS: Final = (
    "can't allocate memory",  # PyTorch's CPU allocator
    "out of memory",  # CUDA's allocator of pinned memory
)


def is_shortage(failure: Failure) -> bool:
    """Return True if the failure is an op that ran out of memory."""
    return failure.kind in OUT_OF_MEMORY and failure.instruction >= 0


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that an allocation failed.

    Some allocators raise a plain RuntimeError, which is recognized by its message.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATORS)


class RoomReport:
    """Makes reports of usable memory to a client: at most one per second, and always after a failed allocation.

    Attributes:
        next: time (`clock`) before which only a failed allocation triggers a report.
    """

    def __init__(self, runtime: DeviceRuntime, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runtime, self._clock = runtime, clock
        self.next = 0.0
        self._last_report: int | None = None

    def due(self, session_bytes: int, failures: Sequence[Failure]) -> Room | None:
        """Return a report after a submission, or None if no report is due or the memory has hardly changed.

        `session_bytes`: bytes that the session uses. `failures`: failures of the submission.
        """
        short = bool(failures) and any(failure.kind in OUT_OF_MEMORY for failure in failures)
        now = self._clock()
        if now < self.next and not short:
            return None
        self.next = now + REPORT_SECONDS
        figures = self._runtime.memory()
        free = figures["free"] + max(
            0, figures.get("reserved", 0) - figures.get("allocated", 0)
        )  # allocators reuse cached memory
        room = min(free + session_bytes, figures["total"])
        if (
            not short
            and self._last_report is not None
            and abs(room - self._last_report) <= MIN_CHANGE * self._last_report
        ):
            return None
        self._last_report = room
        return Room(room, short)
