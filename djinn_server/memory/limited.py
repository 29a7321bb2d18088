"""A device runtime with a memory limit.

A copy to the device first frees memory. A copy from the device first restores the tensor if it was evicted.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from djinn_core import torch_private
from djinn_server.disk_quota import DiskQuota
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.memory.ledger import Ledger
from djinn_server.memory.spill import spill_spaces


class LimitedRuntime(DeviceRuntime):
    """A device runtime whose values use at most `limit` bytes.

    With `limit` 0, values are evicted only if the device's memory runs out or their sessions are idle.

    Attributes:
        ledger: the memory ledger of the device.
    """

    def __init__(self, runtime: DeviceRuntime, limit: int, disk: DiskQuota) -> None:
        super().__init__(runtime.device)
        self.hang_seconds, self.ahead_seconds = runtime.hang_seconds, runtime.ahead_seconds
        self.ledger = Ledger(
            runtime, limit or runtime.memory()["total"], spill_spaces(runtime, disk), on_demand=not limit
        )
        self.opens_memory = runtime.opens_memory and not limit  # the ledger does not count memory of peers
        self._runtime = runtime
        self._is_host = runtime.device.type == "cpu"
        if not limit:
            return
        # The analysis libraries take a second to load, and their memory belongs to no session.
        self.ledger.loading_thread = threading.Thread(target=_load_lazy_modules, name="djinn-early", daemon=True)
        self.ledger.loading_thread.start()

    def receive(self, data: torch.Tensor) -> torch.Tensor:
        """Return data in memory that can be evicted. Network buffers and parts of larger memory are copied.

        Raises:
            torch.OutOfMemoryError: there is not enough memory.
        """
        if self.ledger.on_demand:
            return self.ledger.with_room(lambda: self._runtime.receive(data))
        with self.ledger.lock:
            self.ledger.admit(data.nbytes)
            if not self._is_host:
                return self._runtime.receive(data)
            storage = data.untyped_storage()
            return data if storage.resizable() and storage.nbytes() == data.nbytes else data.clone()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory for an upload, as `DeviceRuntime.allocate` does.

        With a limit it is host memory, because device memory is freed only for complete uploads.
        """
        if self.ledger.on_demand:
            return self.ledger.with_room(lambda: self._runtime.allocate(nbytes))
        return torch.empty(nbytes, dtype=torch.uint8)

    def receive_buffer(self, nbytes: int) -> memoryview | None:
        """Return a receive buffer, as `DeviceRuntime.receive_buffer` does.

        If there is a memory limit, return None: parts of an upload are then collected in host memory.
        """
        return self._runtime.receive_buffer(nbytes) if self.ledger.on_demand else None

    def write(self, target: torch.Tensor, start: int, data: torch.Tensor) -> None:
        """Write bytes, as `DeviceRuntime.write` does."""
        self._runtime.write(target, start, data)

    def overwrite(self, target: torch.Tensor, data: torch.Tensor) -> None:
        """Overwrite a tensor, as `DeviceRuntime.overwrite` does."""
        self._runtime.overwrite(target, data)

    def commit(self, target: torch.Tensor) -> torch.Tensor:
        """Complete an upload, as `DeviceRuntime.commit` does."""
        return self.receive(target) if target.device.type == "cpu" else self._runtime.commit(target)

    def export(self, tensor: torch.Tensor) -> bytes | None:
        """Export memory, as `DeviceRuntime.export` does."""
        return self._runtime.export(tensor)

    def open(self, description: bytes) -> torch.Tensor:
        """Open exported memory, as `DeviceRuntime.open` does.

        A failure is not retried after an eviction, because a description can be opened only once.
        """
        return self._runtime.open(description)

    def start_delivery(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start a copy to the host, as `DeviceRuntime.start_delivery` does.

        If the tensor could be evicted meanwhile, the copy is complete when this method returns.

        Raises:
            torch.OutOfMemoryError: there is not enough memory.
        """
        with self.ledger.lock:
            self.ledger.reload(tensor)
            if self._is_host and not self.ledger.on_demand:
                host_copy = tensor.clone()
                return lambda: host_copy
            finish = self.ledger.with_room(lambda: self._runtime.start_delivery(tensor))
            if not self._is_host and not (self.ledger.on_demand and self.ledger.all_resident):
                host_copy = finish()
                return lambda: host_copy
            key = torch_private.storage_key(tensor)
            self.ledger.delivering[key] += 1

        def deliver() -> torch.Tensor:
            try:
                return finish()
            finally:
                with self.ledger.lock:
                    self.ledger.delivering[key] -= 1
                    if not self.ledger.delivering[key]:
                        del self.ledger.delivering[key]

        return deliver

    def is_lost(self, error: BaseException) -> bool:
        """Return True if the device is lost, as `DeviceRuntime.is_lost` does."""
        return self._runtime.is_lost(error)

    def waits_since(self) -> float:
        """Return the start of the longest wait for a copy, as `DeviceRuntime.waits_since` does."""
        return self._runtime.waits_since()

    def mark(self, *, timing: bool = False) -> Any:
        """Return an event, as `DeviceRuntime.mark` does."""
        return self._runtime.mark(timing=timing)

    def synchronize(self) -> None:
        """Wait for all ops, as `DeviceRuntime.synchronize` does."""
        self._runtime.synchronize()

    def generator(self) -> torch.Generator:
        """Return a generator, as `DeviceRuntime.generator` does."""
        return self._runtime.generator()

    def memory(self) -> Mapping[str, int]:
        """Return memory figures, as `DeviceRuntime.memory` does, with the limit as `total`."""
        figures = dict(self._runtime.memory())
        if self.ledger.on_demand:
            return figures
        total = min(self.ledger.limit, figures.get("total", self.ledger.limit))
        free = min(max(0, self.ledger.limit - self.ledger.resident()), figures.get("free", self.ledger.limit))
        if "peak" in figures:  # the device resets its peak at each run
            figures["peak"] = max(figures["peak"], self.ledger.process.peak)
        return figures | {
            "total": total,
            "free": free,
            "spill": sum(space.free_bytes() for space in self.ledger.spill_spaces),
            "pressure": self.ledger.pressure.level,
        }


@contextmanager
def in_memory(tensor: torch.Tensor, runtime: DeviceRuntime) -> Iterator[None]:
    """Return a context in which a value is on the device. The value is restored if it was evicted."""
    ledger = ledger_of(runtime)
    if ledger is None:
        yield
        return
    with ledger.lock:
        ledger.reload(tensor)
        yield


def ledger_of(runtime: DeviceRuntime) -> Ledger | None:
    """Return the memory ledger of a device, or None if the device never evicts values."""
    return runtime.ledger if isinstance(runtime, LimitedRuntime) else None


def _load_lazy_modules() -> None:
    """Import modules that PyTorch loads late, which takes a second.

    PyTorch loads them at the first op on a tensor subclass, and at the first meta kernel.
    """
    if torch.distributed.is_available():
        importlib.import_module("torch.distributed.tensor")
    importlib.import_module("torch._dynamo")
