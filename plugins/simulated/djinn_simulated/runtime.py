"""A simulated device: each op takes its predicted time, and computes nothing.

Its tensors are host memory full of zeros. Unwritten pages take no memory, so a model of many gigabytes fits. Views and
result shapes are real.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from djinn.hooks import DeviceRuntime
from djinn.planning import DeviceCapabilities
from djinn_simulated.pretending import SimulationMode

# Smaller uploads keep their contents: masks and indices, which determine shapes.
REAL_BYTES: Final = 1 << 20


class SimulatedRuntime(DeviceRuntime):
    """Runtime of one simulated device in this process."""

    keeps_time = True

    def __init__(self, capabilities: DeviceCapabilities) -> None:
        super().__init__(torch.device("cpu"))
        self._capabilities = capabilities
        self._lock = threading.Lock()
        self._allocated = 0
        self._seconds = 0.0

    def receive(self, data: torch.Tensor) -> torch.Tensor:
        """Return `data` if it has at most `REAL_BYTES` bytes, otherwise as many zeros."""
        if data.numel() <= REAL_BYTES:
            return data
        return self.zeros(data.numel())

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of total, free and allocated memory, by name, as the simulated device would report them."""
        total = self._capabilities.memory
        return {"total": total, "free": max(0, total - self._allocated), "allocated": self._allocated}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context in which ops take simulated time and do not compute."""
        with SimulationMode(self._capabilities, self.zeros, self._add_seconds):
            yield

    def take_seconds(self) -> float:
        """Return the simulated seconds since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add_seconds(self, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds

    def zeros(self, size: int) -> torch.Tensor:
        """Return `size` zero bytes of the device's memory.

        Raises:
            torch.OutOfMemoryError: the simulated device is out of memory.
        """
        with self._lock:
            free_bytes = self._capabilities.memory - self._allocated
            if size > free_bytes:
                raise torch.OutOfMemoryError(
                    f"{self._capabilities.name} has {self._capabilities.memory:,} bytes, of which {free_bytes:,} are free; {size:,} were requested"
                )
            self._allocated += size
        octets = np.zeros(size, np.uint8)  # calloc: the system allocates pages when they are first written
        weakref.finalize(octets, self._free, size).atexit = False
        return torch.from_numpy(octets)

    def _free(self, size: int) -> None:
        with self._lock:
            self._allocated -= size
