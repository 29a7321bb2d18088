"""The device `counted`: a CPU device that measures peak memory through PyTorch's allocator.

CPUs have no counter like `torch.cuda.max_memory_allocated`. Before each program this device counts the existing
tensors. During the program, PyTorch's profiler reports each allocation and release, including those inside of ops.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch.autograd.profiler import profile

from djinn.hooks import Device, DeviceRuntime, hookimpl
from djinn.planning import DeviceCapabilities
from djinn_server.builtins.cpu import CpuDevice, CpuRuntime

djinn_api_version = "2.0"


class CountedRuntime(CpuRuntime):
    """A CPU runtime whose `memory` includes the allocator's peak."""

    keeps_time = True

    def __init__(self) -> None:
        super().__init__()
        self._peak = 0
        self._seconds = 0.0
        self._own = frozenset(_storages())  # tensors of libraries

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of the device's memory by name, including `peak`."""
        return {**super().memory(), "peak": self._peak}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return the context that counts during a program."""
        now = sum(size for address, size in _storages().items() if address not in self._own)
        with profile(profile_memory=True) as report:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
        self._peak = max(self._peak, now)
        for change in _changes(report.kineto_results.experimental_event_tree()):
            now += change
            self._peak = max(self._peak, now)

    def take_seconds(self) -> float:
        """Return the seconds that programs have run since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class CountedDevice(Device):
    """The device `counted:0`."""

    name = "counted"

    def discover(self) -> Sequence[DeviceCapabilities]:
        """Return the capabilities of the CPU."""
        return tuple(attrs.evolve(item, id="counted:0", kind="counted") for item in CpuDevice().discover())

    def open(self, index: int) -> DeviceRuntime:
        """Open the CPU for this process."""
        del index
        return CountedRuntime()


def _storages() -> dict[int, int]:
    """Return the bytes of all storages of this process by address."""
    gc.collect()  # garbage must not count
    results = {}
    for item in gc.get_objects():
        if type(item) is torch.Tensor and item.device.type == "cpu" and item.layout is torch.strided:
            storage = item.untyped_storage()
            results[storage.data_ptr()] = storage.nbytes()
    return results


def _changes(events: Sequence[Any]) -> list[int]:
    """Return the allocated (positive) and released (negative) bytes in order."""
    results, unread = [], list(events)
    while unread:
        event = unread.pop()
        unread += event.children
        if event.tag.name == "Allocation":
            results.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [size for _, size in sorted(results, key=lambda one: one[0])]


@hookimpl
def djinn_register_devices() -> list[Device]:
    """Return the device."""
    return [CountedDevice()]
