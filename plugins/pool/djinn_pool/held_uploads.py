"""Deferred uploads: tensors and references to stored weights that are sent when a plan chooses their executor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from djinn_client.hookspecs.routers import Executors
from djinn_client.runtime.executor_client import ExecutorClient
from djinn_core.ir.stored_tensor import StoredTensor
from djinn_pool.value_locations import ValueLocations

HELD_LIMIT = 2 << 30  # bytes of deferred uploads; above this limit, the oldest are sent to an executor with free memory
_FILL = 0.8  # share of an executor's free memory to fill before the next executor is used


class HeldUploads:
    """Deferred uploads by handle. Not thread-safe.

    Attributes:
        reads: handles of the uploads that are references (`StoredTensor`) to weights that the executor reads itself.
    """

    def __init__(self, executors: Executors[ExecutorClient], locations: ValueLocations) -> None:
        self._executors = executors
        self.fill(())
        self._locations = locations
        self._uploads: dict[int, torch.Tensor | StoredTensor] = {}
        self._bytes = 0
        self.reads: set[int] = set()

    def fill(self, memory_free: Sequence[int | None]) -> None:
        """Set the bytes that the session may use on each executor, by number. None stands for unknown."""
        self._free = [
            free or 0 for free in memory_free
        ]  # executors of unknown memory are filled evenly, like full ones

    def __len__(self) -> int:
        return len(self._uploads)

    def __contains__(self, handle: int) -> bool:
        return handle in self._uploads

    def hold(self, handle: int, copy: torch.Tensor | StoredTensor) -> list[int]:
        """Defer the upload of `copy`. Return the handles that the caller must send now to keep the limit `HELD_LIMIT`.

        These are the oldest handles. A `StoredTensor` needs no memory in this process and does not count.
        """
        self._uploads[handle] = copy
        if isinstance(copy, StoredTensor):
            self.reads.add(handle)
        else:
            self._bytes += copy.nbytes
        over: list[int] = []
        bytes_left = self._bytes
        for oldest, tensor in self._uploads.items() if bytes_left > HELD_LIMIT else ():
            if bytes_left <= HELD_LIMIT:
                break
            if oldest not in self.reads:
                over.append(oldest)
                bytes_left -= tensor.nbytes
        return over

    def give(self, handle: int, executor: int) -> int:
        """Send the deferred upload of `handle` to an executor. Return the bytes of the tensor."""
        tensor = self._pop(handle)
        self._executors.members[executor].upload(handle, tensor)
        return tensor.nbytes

    def _pop(self, handle: int) -> torch.Tensor | StoredTensor:
        tensor = self._uploads.pop(handle)
        if handle in self.reads:
            self.reads.remove(handle)
        else:
            self._bytes -= tensor.nbytes
        return tensor

    def drop(self, handles: Sequence[int]) -> None:
        """Discard the deferred uploads of these handles, because the program has freed the values."""
        for handle in handles if self._uploads else ():
            if handle in self._uploads:
                self._pop(handle)

    def executor_with_space(self, handle: int) -> int:
        """Return the executor for a deferred upload: the first with enough free bytes, or else the one with the most.

        So weights that are loaded in order stay together.
        """
        return self.executor_with_bytes(self._uploads[handle].nbytes, self._executors.present)

    def executor_with_bytes(self, needed: int, executors: Sequence[int]) -> int:
        """Return the first of `executors` with `needed` free bytes, or else the executor with the most free bytes."""
        rooms = {e: int(self._free[e] * _FILL) - self._locations.held[e] for e in executors}
        fitting = (executor for executor, room in rooms.items() if room >= needed)
        return next(fitting, max(rooms, key=rooms.__getitem__))
