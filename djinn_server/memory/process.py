"""Memory that tensors and ops take of this process, and the return of the allocator's free memory to the system."""

from __future__ import annotations

from djinn_core.logs import get_logger
from djinn_server.malloc_trim import trimmer
from djinn_server.system import memory

_log = get_logger("djinn.server")


class ProcessMemory:
    """Resident bytes beyond those after the process's first program, with which libraries load; before it, beyond those at the start."""

    def __init__(self) -> None:
        """Raises `OSError` where the kernel does not tell."""
        self._resident = memory.resident()
        self._base = self._resident.now()
        self._begun = False
        self._trim = trimmer()
        self._resettable = self._resident.tells_peak
        self.peak = 0

    def resident(self) -> int:
        """Resident bytes."""
        return self._resident.now()

    def begin(self, held: int) -> None:
        """Note, once, that tensors take `held` bytes: the rest of what is resident now is the process's own."""
        if not self._begun:
            self._begun = True
            self.trim()  # what uploads have freed is not the process's own
            self._base = self.resident() - held

    def beyond(self) -> int:
        """Bytes that tensors and ops take: resident bytes without the process's own."""
        return max(0, self.resident() - self._base)

    def restart_peak(self) -> None:
        """Count the peak again."""
        if self._resettable:
            try:
                self._resident.restart_peak()
            except OSError as error:
                self._resettable = False
                _log.info("what ops take beside their results is not known", error=str(error))

    def peak_beyond(self) -> int | None:
        """As `beyond`, the most since the peak was last counted again; None if that cannot be known."""
        if not self._resettable or not self._begun:
            return None
        peak = max(0, self._resident.peak() - self._base)
        self.peak = max(self.peak, peak)
        return peak

    def trim(self) -> None:
        """Return memory that the allocator has kept to the system."""
        self._trim()

    def close(self) -> None:
        """Ask no more."""
        self._resident.close()


def process_memory(kind: str) -> ProcessMemory | None:
    """For executors whose device is the host; None elsewhere, and where the kernel does not tell."""
    if kind != "cpu":
        return None
    try:
        return ProcessMemory()
    except OSError as error:
        _log.warning("a limit is kept for tensors alone: what the process takes is not known", error=str(error))
        return None
