"""Built-in kinds of devices: `cpu`, and accelerators that need only PyTorch."""

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
    """The CPU as an opened device. An op is complete when the call that issues it returns."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def synchronize(self) -> None:
        """Return at once: ops are synchronous."""

    def memory(self) -> Mapping[str, int]:
        """Return `total` and `free` bytes of the machine or container, and resident bytes as `allocated`."""
        return {"total": total_bytes(), "free": free_bytes(), "allocated": _allocated()}


class CpuDevice(Device):
    """The kind of device `cpu`. A machine has one such device, `cpu:0`, with all processors."""

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
    """The kind of device `xpu`: Intel GPUs. Untested."""

    name = "xpu"
    chosen_by_name = True


class MpsDevice(Device):
    """The kind of device `mps`: the GPU of an Apple computer. Untested."""

    name = "mps"
    chosen_by_name = True


@hookimpl
def djinn_register_devices() -> list[Device]:
    """Return the built-in kinds of devices."""
    return [CpuDevice(), XpuDevice(), MpsDevice()]


def _allocated() -> int:
    """Return the resident bytes of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)
