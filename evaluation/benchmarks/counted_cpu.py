"""A plugin with the device `counted`: the processors, whose allocator is asked for the most bytes that were there at once.

CPUs have no counter like `torch.cuda.max_memory_allocated`. Before each program this device counts the tensors that there are, and
while it runs PyTorch's allocator tells of each block that it gives and takes back, those inside of ops too.
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
    """The processors; `memory` has the peak of the allocator."""

    keeps_time = True

    def __init__(self) -> None:
        super().__init__()
        self._peak = 0
        self._seconds = 0.0
        self._own = frozenset(_storages())  # tensors of libraries

    def memory(self) -> Mapping[str, int]:
        """Bytes, with `peak`."""
        return {**super().memory(), "peak": self._peak}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count while a program runs."""
        now = sum(size for address, size in _storages().items() if address not in self._own)
        with profile(profile_memory=True) as told:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
        self._peak = max(self._peak, now)
        for change in _changes(told.kineto_results.experimental_event_tree()):
            now += change
            self._peak = max(self._peak, now)

    def take_seconds(self) -> float:
        """Time of programs since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class CountedDevice(Device):
    """`counted:0`."""

    name = "counted"

    def discover(self) -> Sequence[DeviceCapabilities]:
        """As `cpu:0`."""
        return tuple(attrs.evolve(one, id="counted:0", kind="counted") for one in CpuDevice().discover())

    def open(self, index: int) -> DeviceRuntime:
        """The processors, for this process."""
        del index
        return CountedRuntime()


def _storages() -> dict[int, int]:
    """Bytes of the memory that tensors of this process have, by its address."""
    gc.collect()  # what is garbage already does not count
    found = {}
    for one in gc.get_objects():
        if type(one) is torch.Tensor and one.device.type == "cpu" and one.layout is torch.strided:
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def _changes(events: Sequence[Any]) -> list[int]:
    """Bytes that were given, or taken back, in the order in which that happened."""
    found, left = [], list(events)
    while left:
        event = left.pop()
        left += event.children
        if event.tag.name == "Allocation":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [size for _, size in sorted(found, key=lambda one: one[0])]


@hookimpl
def djinn_register_devices() -> list[Device]:
    """The device."""
    return [CountedDevice()]
