"""The device `cpu`: computes on the server's processors. Built in, so that Djinn works without any plugin."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from djinn_core.errors import StartupError
from djinn_core.hookspecs import API_VERSION, hookimpl
from djinn_core.hookspecs.devices import Device, DeviceRuntime
from djinn_core.ir.costs import DeviceCapabilities

djinn_api_version = API_VERSION

# Of the second and of the first version of Linux control groups; a machine has one of them.
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_CGROUP_USE = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))


class CpuRuntime:
    """The processors, opened for this process. Every op is complete when its call returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def receive(self, data: torch.Tensor) -> torch.Tensor:
        """`data` itself: it is where it must be, and has no other references."""
        return data

    def deliver(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` itself, since it is in host memory and complete."""
        return tensor

    def synchronize(self) -> None:
        """Nothing: ops on the CPU have run, and raised, when they return."""

    def generator(self) -> torch.Generator:
        """A new random generator."""
        return torch.Generator(device=self.device)

    def memory(self) -> Mapping[str, int]:
        """Bytes: `total` and `free` of what this machine or container may use, `allocated` resident in this process."""
        return {"total": _total(), "free": _free(), "allocated": _allocated()}


class CpuDevice:
    """The one CPU device of a machine, `cpu:0`."""

    name = "cpu"

    def discover(self) -> Sequence[DeviceCapabilities]:
        """All processors together, as one device."""
        title = f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors"
        return (DeviceCapabilities("cpu:0", "cpu", title, memory=_total(), memory_free=_free()),)

    def open(self, index: int) -> DeviceRuntime:
        """The processors, for this process.

        Raises:
            StartupError: `index` is not 0.
        """
        if index != 0:
            raise StartupError(f"there is no device cpu:{index}: all processors together are cpu:0. Ask for `cpu`")
        return CpuRuntime()


@hookimpl
def djinn_register_devices() -> list[Device]:
    """The CPU."""
    return [CpuDevice()]


def _total() -> int:
    """Bytes of the machine's memory, or of the container's where that is less."""
    import psutil

    return min([int(psutil.virtual_memory().total), *_figures(_CGROUP_LIMITS)])


def _free() -> int:
    """Bytes that can still be had without swapping."""
    import psutil

    room = [limit - used for limit, used in zip(_figures(_CGROUP_LIMITS), _figures(_CGROUP_USE), strict=False)]
    return max(0, min([int(psutil.virtual_memory().available), _total(), *room]))


def _figures(paths: Sequence[Path]) -> list[int]:
    """The numbers in those of the files that exist and hold one (a group without a limit says `max`)."""
    return [int(text) for path in paths if path.is_file() and (text := path.read_text().strip()).isdigit()]


def _allocated() -> int:
    """Resident bytes of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)
