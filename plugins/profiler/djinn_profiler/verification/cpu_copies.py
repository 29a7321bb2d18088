"""LRU cache of CPU copies of remote storages, and tensors that view them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch

from djinn.planning import TensorMeta
from djinn_client.interception.tensors.partial_fetch import memory_between
from djinn_client.interception.tensors.storage import Value
from djinn_profiler.verification.recorded_ops import fetch_all

UsedValue = tuple[Value, TensorMeta]  # a value, and its metadata at the time of use


class CpuCopies:
    """LRU cache of CPU copies of remote storages. Views of a copy have the same layout and aliasing as on the device."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  # limit in bytes; data of one `load` stays until the next
        self._copies: OrderedDict[int, torch.Tensor] = OrderedDict()

    def load(self, used_values: Iterable[UsedValue]) -> None:
        """Fetch the storage of each value, from the storage's start to the value's end, unless this part is cached."""
        missing: dict[int, UsedValue] = {}
        unchanged: set[int] = set()
        for value, meta in used_values:
            storage = value.storage.id
            here = self._copies.get(storage)
            if here is not None and here.nbytes >= _end(meta):
                unchanged.add(storage)
            elif storage not in missing or _end(missing[storage][1]) < _end(meta):
                missing[storage] = value, meta
        self._trim(unchanged)
        flat = [memory_between(value, 0, _end(meta)) for value, meta in missing.values()]
        for storage, copy in zip(missing, fetch_all(flat), strict=True):
            self._copies[storage] = copy.clone()

    def pop(self, storage: int) -> torch.Tensor | None:
        """Remove and return the copy of a storage that is about to be written."""
        return self._copies.pop(storage, None)

    def copy_of(self, storage: int) -> torch.Tensor:
        """Return the copy of a storage. `load` must have fetched it."""
        return self._copies[storage]

    def _trim(self, used_storages: set[int]) -> None:
        total = sum(copy.nbytes for copy in self._copies.values())
        for storage in list(self._copies):
            if storage in used_storages:
                self._copies.move_to_end(storage)
            elif total > self._limit:
                total -= self._copies.pop(storage).nbytes


def _end(meta: TensorMeta) -> int:
    return meta.extent * meta.dtype.itemsize
