"""Finding and opening GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from djinn.errors import StartupError
from djinn.hooks import Device, DeviceRuntime
from djinn.planning import DeviceCapabilities
from djinn_cuda.memory import device_memory
from djinn_cuda.runtime import CudaRuntime


class Driver(Protocol):
    """CUDA queries before a device is opened."""

    def count(self) -> int:
        """Number of GPUs that this process may use; 0 with a CPU build of torch."""

    def describe(self, index: int) -> tuple[str, int, int]:
        """Name of GPU `index`, and its memory in bytes: total and free."""


class TorchDriver:
    """Asks torch and the driver's management library."""

    def count(self) -> int:
        """As torch sees it."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def describe(self, index: int) -> tuple[str, int, int]:
        """Name from torch, memory without taking any on the GPU."""
        properties = torch.cuda.get_device_properties(index)
        total, free = device_memory(index, str(properties.uuid))
        return properties.name, total, free


class CudaDevice(Device):
    """The GPUs of this machine, `cuda:0` and so on."""

    name = "cuda"

    def __init__(self, driver: Driver | None = None) -> None:
        self._driver = driver or TorchDriver()

    def discover(self) -> Sequence[DeviceCapabilities]:
        """The GPUs that this process may use; none without CUDA."""
        return tuple(self._capabilities(index) for index in range(self._driver.count()))

    def _capabilities(self, index: int) -> DeviceCapabilities:
        title, total, free = self._driver.describe(index)
        return DeviceCapabilities(f"cuda:{index}", "cuda", title, memory=total, memory_free=free)

    def open(self, index: int) -> DeviceRuntime:
        """A GPU for this process.

        Raises:
            StartupError: there is no such GPU, or it does not work.
        """
        count = self._driver.count()
        if count == 0:
            raise StartupError(
                "there is no GPU that this PyTorch can use: check `nvidia-smi`, CUDA_VISIBLE_DEVICES, and that torch is a "
                f"CUDA build (this is {torch.__version__}), or serve with `--device cpu`"
            )
        if not 0 <= index < count:
            raise StartupError(f"there is no device cuda:{index}: this process may use cuda:0 to cuda:{count - 1}")
        try:
            return CudaRuntime(index)
        except (RuntimeError, AssertionError) as error:  # torch's for a broken, full or too old GPU, driver or build
            raise StartupError(f"cuda:{index} does not work: {error}. `nvidia-smi` may say more") from error
