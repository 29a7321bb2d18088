"""Memory of the executor process on a host device: measure what tensors and ops use, and return freed memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from djinn_core.logs import get_logger
from djinn_server.malloc_trim import trimmer
from djinn_server.system.memory import Resident, resident

FULL: Final = 0.95  # share of the limit; above it, ops have too little memory
STEPS: Final = 64  # step of the reserve: limit/N
RESERVE: Final = 4  # initial reserve: limit/N
_log = get_logger("djinn.server")


class ProcessMemory:
    """Measure the resident memory of tensors and ops, and reserve memory for temporary memory of ops.

    Attributes:
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

        `resident`: meter of resident memory; None if the system has none, and then the reserve is constant. `trim`: returns
        freed memory to the system.
        """
        self.limit = limit
        self.reserve = limit // RESERVE if reserve is None else reserve
        self.peak = 0
        self._resident, self._trim = resident, trim
        self._base = 0 if resident is None else resident.now()  # bytes of the process itself
        self._measured = False
        self._resets = resident is not None and resident.tells_peak

    def taken(self) -> int:
        """Return the bytes of tensors and ops. Before the first measurement, libraries are included."""
        return 0 if self._resident is None else max(0, self._resident.now() - self._base)

    def trim_before(self, nbytes: int) -> None:
        """Return freed memory to the system if the process would exceed the limit with `nbytes` more."""
        if self.taken() + nbytes > self.limit - self.reserve // 2:
            self._trim()

    def measure(self, held: int) -> None:
        """Update the reserve, while tensors use `held` bytes.

        If the process is full, its bytes above `held` become the reserve.
        """
        if self._resident is None:
            return
        if not self._measured:
            self._measured = True
            self._trim()  # of freed uploads
            self._base = self._resident.now() - held
        if self.taken() > FULL * self.limit:
            self._trim()
            self._leave(self.taken() - held)

    def begin_run(self) -> None:
        """Start to measure the peak of a run."""
        self._note_peak()
        if self._resets and self._resident is not None:
            try:
                self._resident.restart_peak()
            except OSError as error:
                self._resets = False
                _log.info("the work space of ops is not known", error=str(error))

    def end_run(self, peak: int) -> None:
        """Update the reserve after a run whose tensors used at most `peak` bytes."""
        if (peak_bytes := self._note_peak()) is None:
            return
        if peak_bytes > FULL * self.limit:
            self._leave(self.reserve + peak_bytes - int(FULL * self.limit))
        elif peak > FULL * (self.limit - self.reserve) and peak_bytes < FULL**2 * self.limit:
            self.reserve = max(self.reserve - self.limit // STEPS, self.limit // STEPS)

    def _note_peak(self) -> int | None:
        if not self._resets or self._resident is None or not self._measured:
            return None
        above = max(0, self._resident.peak() - self._base)
        self.peak = max(self.peak, above)
        return above

    def _leave(self, beside: int) -> None:
        self.reserve = min(max(self.reserve, beside + self.limit // STEPS), self.limit // 2)


def process_memory(device: torch.device, limit: int) -> ProcessMemory:
    """Return the meter of this process. Accelerators need none, so nothing is reserved."""
    if device.type != "cpu":
        return ProcessMemory(limit, None, reserve=0)
    try:
        return ProcessMemory(limit, resident(), trimmer())
    except OSError as error:
        _log.warning("the memory limit counts tensors only: the memory of the process cannot be read", error=str(error))
        return ProcessMemory(limit, None)
