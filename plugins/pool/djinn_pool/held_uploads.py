"""Deferred uploads: copies, and names of what executors read themselves, that wait until it is known which executor uses them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from djinn_client.runtime.executor_client import ExecutorClient
from djinn_core.hookspecs.routers import Executors
from djinn_core.ir.stored_tensor import StoredTensor
from djinn_pool.value_locations import ValueLocations

HELD_LIMIT = 2 << 30  # bytes that may wait; beyond them, the oldest go to where there is room
_FILL = 0.8  # of an executor's free memory, after which the next one is filled


class HeldUploads:
    """Copies of tensors that programs have not used yet, by handle. Not thread-safe.

    Attributes:
        reads: handles of what waits and is read by the executor that gets it.
    """

    def __init__(self, executors: Executors[ExecutorClient], locations: ValueLocations) -> None:
        self._executors = executors
        self.fill(())
        self._locations = locations
        self._held: dict[int, torch.Tensor | StoredTensor] = {}
        self._bytes = 0
        self.reads: set[int] = set()

    def fill(self, memory_free: Sequence[int | None]) -> None:
        """Set the bytes that the session may hold on each executor; None if that is not known."""
        self._free = [free or 0 for free in memory_free]  # what is not known is filled like what is full: evenly

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, handle: int) -> bool:
        return handle in self._held

    def hold(self, handle: int, copy: torch.Tensor | StoredTensor) -> list[int]:
        """Keep `copy`, now the only one; return the handles that have waited longest and cannot wait any more.

        What an executor reads itself may wait for ever: it takes no memory here.
        """
        self._held[handle] = copy
        if isinstance(copy, StoredTensor):
            self.reads.add(handle)
        else:
            self._bytes += copy.nbytes
        over: list[int] = []
        left = self._bytes
        for oldest, tensor in self._held.items() if left > HELD_LIMIT else ():
            if left <= HELD_LIMIT:
                break
            if oldest not in self.reads:
                over.append(oldest)
                left -= tensor.nbytes
        return over

    def give(self, handle: int, executor: int) -> int:
        """Send what waits as `handle` to an executor; its bytes."""
        tensor = self._take(handle)
        self._executors.members[executor].upload(handle, tensor)
        return tensor.nbytes

    def _take(self, handle: int) -> torch.Tensor | StoredTensor:
        tensor = self._held.pop(handle)
        if handle in self.reads:
            self.reads.remove(handle)
        else:
            self._bytes -= tensor.nbytes
        return tensor

    def drop(self, handles: Sequence[int]) -> None:
        """Drop those of some values that wait here: the program holds them no more."""
        for handle in handles if self._held else ():
            if handle in self._held:
                self._take(handle)

    def roomy(self, handle: int) -> int:
        """The first executor that has room for what waits, so that what is loaded in order stays together."""
        return self.roomy_for(self._held[handle].nbytes, self._executors.present)

    def roomy_for(self, needed: int, executors: Sequence[int]) -> int:
        """The first of some executors that has room for so many bytes; the one that has most, where none has."""
        rooms = {e: int(self._free[e] * _FILL) - self._locations.held[e] for e in executors}
        fitting = (executor for executor, room in rooms.items() if room >= needed)
        return next(fitting, max(rooms, key=rooms.__getitem__))
