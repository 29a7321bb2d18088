"""Built-in devices: `cpu`, the server's processors, and accelerators that need only PyTorch."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence

import torch

from djinn_core.errors import StartupError
from djinn_core.hookspecs import hookimpl
from djinn_core.ir.costs import DeviceCapabilities
from djinn_server.hookspecs.devices import Device, DeviceRuntime
from djinn_server.system.memory import free_bytes, total_bytes

djinn_api_version = "2.0"


class CpuRuntime(DeviceRuntime):
    """The CPU, opened for this process. Every op is complete when its call returns."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def synchronize(self) -> None:
        """Return at once: ops are synchronous."""

    def memory(self) -> Mapping[str, int]:
        """Return bytes: `total` and `free` of the machine or container, and the resident memory as `allocated`."""
        return {"total": total_bytes(), "free": free_bytes(), "allocated": _allocated()}


class CpuDevice(Device):
    """The one CPU device of a machine, `cpu:0`."""

    name = "cpu"

    def discover(self) -> Sequence[DeviceCapabilities]:
        """Return all processors as one device."""
        title = f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors"
        return (DeviceCapabilities("cpu:0", "cpu", title, memory=total_bytes(), memory_free=free_bytes()),)

    def open(self, index: int) -> DeviceRuntime:
        """Return the CPU, opened for this process.

        Raises:
            StartupError: `index` is not 0.
        """
        if index != 0:
            raise StartupError(f"there is no device cpu:{index}: all processors together are cpu:0. Ask for `cpu`")
        return CpuRuntime()


class XpuDevice(Device):
    """Intel GPUs. Untried."""

    name = "xpu"
    chosen_by_name = True


class MpsDevice(Device):
    """The GPU of an Apple computer. Untried."""

    name = "mps"
    chosen_by_name = True


@hookimpl
def djinn_register_devices() -> list[Device]:
    """Return the built-in kinds."""
    return [CpuDevice(), XpuDevice(), MpsDevice()]


def _allocated() -> int:
    """Return the resident bytes of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)
