"""A device runtime with a memory limit: copies to the device make room first, and copies from it reload evicted tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from djinn_core.hookspecs.devices import DeviceRuntime
from djinn_server.compiling.torch_libraries import load_early
from djinn_server.disk_quota import DiskQuota
from djinn_server.memory.eviction import Decider
from djinn_server.memory.ledger import Ledger
from djinn_server.memory.spill import spill_space


class LimitedRuntime(DeviceRuntime):
    """A wrapper of a device runtime that uses at most `limit` bytes; `decider`: what is evicted first."""

    def __init__(self, runtime: DeviceRuntime, limit: int, disk: DiskQuota, decider: Decider | None = None) -> None:
        super().__init__(runtime.device)
        self.hang_seconds = runtime.hang_seconds
        self.ledger = Ledger(limit, runtime.device, spill_space(runtime, disk), decider)
        self._runtime = runtime
        self._is_host = runtime.device.type == "cpu"
        # The libraries that analyse programs take a second to load, and memory that is no session's.
        self.ledger.loading = threading.Thread(target=load_early, name="djinn-early", daemon=True)
        self.ledger.loading.start()

    def receive(self, data: torch.Tensor) -> torch.Tensor:
        """As `DeviceRuntime.receive`, in memory that can be taken away: what came over the wire cannot, nor a part of other memory.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        with self.ledger.lock:
            self.ledger.admit(data.nbytes)
            if not self._is_host:
                return self._runtime.receive(data)
            storage = data.untyped_storage()
            return data if storage.resizable() and storage.nbytes() == data.nbytes else data.clone()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return host memory: only a whole upload makes room on the device."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def deliver(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `DeviceRuntime.deliver`; a copy, because the memory may be taken while it is sent.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        with self.ledger.lock:
            self.ledger.reload(tensor)
            return tensor.clone() if self._is_host else self._runtime.deliver(tensor)

    def is_lost(self, error: BaseException) -> bool:
        """As `DeviceRuntime.is_lost`."""
        return self._runtime.is_lost(error)

    def synchronize(self) -> None:
        """As `DeviceRuntime.synchronize`."""
        self._runtime.synchronize()

    def generator(self) -> torch.Generator:
        """As `DeviceRuntime.generator`."""
        return self._runtime.generator()

    def memory(self) -> Mapping[str, int]:
        """As `DeviceRuntime.memory`, of what the limit leaves."""
        found = dict(self._runtime.memory())
        total = min(self.ledger.limit, found.get("total", self.ledger.limit))
        free = min(max(0, self.ledger.limit - self.ledger.resident()), found.get("free", self.ledger.limit))
        return found | {
            "total": total,
            "free": free,
            "spill": self.ledger.space.room(),
            "pressure": self.ledger.pressure.level,
        }


@contextmanager
def in_memory(tensor: torch.Tensor, runtime: DeviceRuntime) -> Iterator[None]:
    """A block in which a value's bytes are in memory, and stay there."""
    ledger = ledger_of(runtime)
    if ledger is None:
        yield
        return
    with ledger.lock:
        ledger.reload(tensor)
        yield


def ledger_of(runtime: DeviceRuntime) -> Ledger | None:
    """The ledger of a device's memory, where that has a limit."""
    return runtime.ledger if isinstance(runtime, LimitedRuntime) else None
