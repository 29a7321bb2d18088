"""Memory of the executor process on a CPU: measure the bytes of tensors and ops, and return freed memory to the system."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from djinn_core.logs import get_logger
from djinn_server.malloc_trim import trimmer
from djinn_server.system.memory import Resident, resident

FULL_SHARE: Final = 0.95  # fraction of the limit above which ops have too little memory
RESERVE_STEPS: Final = 64  # the reserve changes by limit / RESERVE_STEPS
INITIAL_RESERVE: Final = 4  # the initial reserve is limit / INITIAL_RESERVE
_log = get_logger("djinn.server")


class ProcessMemory:
    """Measures the resident memory of tensors and ops, and adapts the reserve for temporary memory of ops.

    Attributes:
        limit: memory limit in bytes.
        reserve: bytes of the limit that tensors must not use.
        peak: maximum bytes of tensors and ops in measured runs.
    """

    def __init__(
        self,
        limit: int,
        resident: Resident | None,
        trim: Callable[[], object] = lambda: None,
        reserve: int | None = None,
    ) -> None:
        """Create a meter.

        Args:
            limit: memory limit in bytes.
            resident: meter of the process's resident memory. If it is None, the reserve is constant.
            trim: returns freed memory to the system.
            reserve: initial reserve in bytes; None: a fraction of the limit.
        """
        self.limit = limit
        self.reserve = limit // INITIAL_RESERVE if reserve is None else reserve
        self.peak = 0
        self._resident, self._trim = resident, trim
        self._process_bytes = 0 if resident is None else resident.now()  # bytes of the process without tensors
        self._has_measured = False
        self._can_reset_peak = resident is not None and resident.has_peak

    def used_bytes(self) -> int:
        """Return the bytes of tensors and of temporary memory of ops, or 0 without a meter.

        Before the first `measure`, libraries that were loaded since the start count too.
        """
        return 0 if self._resident is None else max(0, self._resident.now() - self._process_bytes)

    def trim_before(self, nbytes: int) -> None:
        """Return freed memory to the system if the process would exceed the limit with `nbytes` more."""
        if self.used_bytes() + nbytes > self.limit - self.reserve // 2:
            self._trim()

    def measure(self, tensor_bytes: int) -> None:
        """Raise the reserve if the process is nearly full. `tensor_bytes`: bytes that tensors use now.

        The process's bytes above `tensor_bytes` then become the reserve.
        """
        if self._resident is None:
            return
        if not self._has_measured:
            self._has_measured = True
            self._trim()  # returns the memory of freed uploads
            self._process_bytes = self._resident.now() - tensor_bytes
        if self.used_bytes() > FULL_SHARE * self.limit:
            self._trim()
            self._raise_reserve(self.used_bytes() - tensor_bytes)

    def begin_run(self) -> None:
        """Start to measure the peak of a run."""
        self._note_peak()
        if self._can_reset_peak and self._resident is not None:
            try:
                self._resident.restart_peak()
            except OSError as error:
                self._can_reset_peak = False
                _log.info(
                    "cannot measure the peak memory of runs: the reserve grows only if the process is nearly full",
                    error=str(error),
                )

    def end_run(self, peak: int) -> None:
        """Update the reserve after a run whose tensors used at most `peak` bytes."""
        if (peak_bytes := self._note_peak()) is None:
            return
        if peak_bytes > FULL_SHARE * self.limit:
            self._raise_reserve(self.reserve + peak_bytes - int(FULL_SHARE * self.limit))
        elif peak > FULL_SHARE * (self.limit - self.reserve) and peak_bytes < FULL_SHARE**2 * self.limit:
            self.reserve = max(self.reserve - self.limit // RESERVE_STEPS, self.limit // RESERVE_STEPS)

    def _note_peak(self) -> int | None:
        if not self._can_reset_peak or self._resident is None or not self._has_measured:
            return None
        used_peak = max(0, self._resident.peak() - self._process_bytes)
        self.peak = max(self.peak, used_peak)
        return used_peak

    def _raise_reserve(self, reserved: int) -> None:
        self.reserve = min(max(self.reserve, reserved + self.limit // RESERVE_STEPS), self.limit // 2)


def process_memory(device: torch.device, limit: int) -> ProcessMemory:
    """Return the meter of this process. For accelerators, it measures nothing and reserves nothing."""
    if device.type != "cpu":
        return ProcessMemory(limit, None, reserve=0)
    try:
        return ProcessMemory(limit, resident(), trimmer())
    except OSError as error:
        _log.warning("the memory limit counts tensors only: the memory of the process cannot be read", error=str(error))
        return ProcessMemory(limit, None)
