"""A simulated device: each op takes its predicted time without computing.

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
    """A simulated device that is opened for this process."""

    keeps_time = True

    def __init__(self, described: DeviceCapabilities) -> None:
        super().__init__(torch.device("cpu"))
        self._described = described
        self._lock = threading.Lock()
        self._allocated = 0
        self._seconds = 0.0

    def receive(self, data: torch.Tensor) -> torch.Tensor:
        """Return zeros in place of `data`. Small data is kept."""
        if data.numel() <= REAL_BYTES:
            return data
        return self.zeros(data.numel())

    def memory(self) -> Mapping[str, int]:
        """Return bytes by name, as the described device would report them."""
        total = self._described.memory
        return {"total": total, "free": max(0, total - self._allocated), "allocated": self._allocated}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return the context in which ops take simulated time and do not compute."""
        with SimulationMode(self._described, self.zeros, self._add_seconds):
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
        """Return `size` bytes of the device's memory.

        Raises:
            RuntimeError: the simulated device is out of memory.
        """
        with self._lock:
            room = self._described.memory - self._allocated
            if size > room:
                raise torch.OutOfMemoryError(
                    f"{self._described.name} has {self._described.memory:,} bytes, of which {room:,} are free; {size:,} were requested"
                )
            self._allocated += size
        octets = np.zeros(size, np.uint8)  # calloc: the system allocates pages when they are first written
        weakref.finalize(octets, self._free, size).atexit = False
        return torch.from_numpy(octets)

    def _free(self, size: int) -> None:
        with self._lock:
            self._allocated -= size
