"""Memory that tensors and ops take of this process or its device, and the return of the allocator's free memory to the system."""

from __future__ import annotations

from collections.abc import Callable

import torch

from djinn_core.logs import get_logger
from djinn_server.malloc_trim import trimmer
from djinn_server.system.memory import Resident, resident

_log = get_logger("djinn.server")


class DeviceBytes:
    """Bytes that PyTorch's allocator has given out of an accelerator's memory, to tensors and to ops. Implements `Resident`."""

    tells_peak = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        """Bytes now."""
        return torch.accelerator.memory_allocated(self._device)

    def restart_peak(self) -> None:
        """Count the peak again."""
        torch.accelerator.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """The most since the peak was last counted again."""
        return torch.accelerator.max_memory_allocated(self._device)

    def close(self) -> None:
        """Do nothing."""


class ProcessMemory:
    """Resident bytes beyond those after the process's first program, with which libraries load; before it, beyond those at the start."""

    def __init__(self, resident: Resident | DeviceBytes, trim: Callable[[], object]) -> None:
        self._resident = resident
        self._base = self._resident.now()
        self._begun = False
        self._trim = trim
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


def process_memory(device: torch.device) -> ProcessMemory | None:
    """Return the memory of this process if the device is the host, else that of the device; None where the kernel does not tell."""
    try:
        if device.type == "cpu":
            return ProcessMemory(resident(), trimmer())
        return ProcessMemory(
            DeviceBytes(device), lambda: None
        )  # its allocator frees what it keeps when it needs memory
    except (OSError, RuntimeError) as error:
        _log.warning("a limit is kept for tensors alone: what the process takes is not known", error=str(error))
        return None
