"""Resident memory of this process, as the kernel reports it, and the return of the allocator's free memory to the system.

Read from `/proc` by hand: it is asked several times in each program, psutil takes ten times as long (28 us against 3), and it
does not tell the peak, nor counts it again.
"""

from __future__ import annotations

import os
from pathlib import Path

from djinn_core.logs import get_logger
from djinn_core.server.malloc_trim import trimmer

_STATM = Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_log = get_logger("djinn.server")


class ProcessMemory:
    """Resident bytes beyond those after the process's first program, with which libraries load; before it, beyond those at the start."""

    def __init__(self) -> None:
        """Raises `OSError` where the kernel does not tell."""
        self._file = os.open(_STATM, os.O_RDONLY)
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._base = self.resident()
        self._begun = False
        self._trim = trimmer()
        self._resettable = _STATUS.exists() and _CLEAR.exists()
        self.peak = 0

    def resident(self) -> int:
        """Resident bytes."""
        return int(os.pread(self._file, 128, 0).split()[1]) * self._page

    def begin(self, held: int) -> None:
        """Tensors take `held` bytes, and what else there is now is not theirs. Once."""
        if not self._begun:
            self._begun = True
            self.trim()  # what uploads have freed is not the process's own
            self._base = self.resident() - held

    def beyond(self) -> int:
        """Bytes that tensors and ops take: resident ones without those of the process itself."""
        return max(0, self.resident() - self._base)

    def restart_peak(self) -> None:
        """Count the peak again."""
        if self._resettable:
            try:
                _CLEAR.write_text(_RESET_PEAK)
            except OSError as error:
                self._resettable = False
                _log.info("what ops take beside their results is not known", error=str(error))

    def peak_beyond(self) -> int | None:
        """As `beyond`, the most since the peak was last counted again; None if that cannot be known."""
        if not self._resettable or not self._begun:
            return None
        lines = _STATUS.read_text().splitlines()
        peak = max(0, next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 - self._base)
        self.peak = max(self.peak, peak)
        return peak

    def trim(self) -> None:
        """Give freed memory back that the allocator kept."""
        self._trim()

    def close(self) -> None:
        """Ask no more."""
        os.close(self._file)


def process_memory(kind: str) -> ProcessMemory | None:
    """For executors whose device is the host; None elsewhere, and where the kernel does not tell."""
    if kind != "cpu":
        return None
    try:
        return ProcessMemory()
    except OSError as error:
        _log.warning("a limit is kept for tensors alone: what the process takes is not known", error=str(error))
        return None
