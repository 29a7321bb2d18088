"""A simulated device: each op takes its predicted time, and computes nothing.

Its tensors are host memory full of zeros. Pages that were never written take no memory, so a model of many gigabytes fits. Views are
real, and results have their real shapes.
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

# Uploads up to this size stay what they are: masks and indices, whose content decides about shapes.
REAL_BYTES: Final = 1 << 20


class SimulatedRuntime(DeviceRuntime):
    """One described device, opened for this process."""

    keeps_time = True

    def __init__(self, described: DeviceCapabilities) -> None:
        super().__init__(torch.device("cpu"))
        self._described = described
        self._lock = threading.Lock()
        self._allocated = 0
        self._seconds = 0.0

    def receive(self, data: torch.Tensor) -> torch.Tensor:
        """Zeros in the place of `data`, but for what is small."""
        if data.numel() <= REAL_BYTES:
            return data
        return self.zeros(data.numel())

    def memory(self) -> Mapping[str, int]:
        """Bytes, as the described device would count them."""
        total = self._described.memory
        return {"total": total, "free": max(0, total - self._allocated), "allocated": self._allocated}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ops that are called inside take time and do nothing."""
        with SimulationMode(self._described, self.zeros, self._pass):
            yield

    def take_seconds(self) -> float:
        """Seconds that the device would have worked since this was asked last."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _pass(self, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds

    def zeros(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes of the device's memory.

        Raises:
            RuntimeError: the device would have no room left.
        """
        with self._lock:
            room = self._described.memory - self._allocated
            if size > room:
                raise torch.OutOfMemoryError(
                    f"{self._described.name} has {self._described.memory:,} bytes, of which {room:,} are free, and "
                    f"{size:,} were asked for"
                )
            self._allocated += size
        octets = np.zeros(size, np.uint8)  # by calloc: pages are allocated when they are first written
        weakref.finalize(octets, self._free, size).atexit = False
        return torch.from_numpy(octets)

    def _free(self, size: int) -> None:
        with self._lock:
            self._allocated -= size
