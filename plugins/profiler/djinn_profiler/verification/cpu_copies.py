"""LRU cache of CPU copies of remote storages, and tensors that view them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch

from djinn.planning import TensorMeta
from djinn_client.interception.tensors.partial_fetch import memory_between
from djinn_client.interception.tensors.storage import Value
from djinn_profiler.verification.recorded_ops import fetch_all

Look = tuple[Value, TensorMeta]  # a value, and its metadata at the time of use


class CpuCopies:
    """LRU cache of copies of remote storages, each from the storage's start.

    Views have the same layout and aliasing as on the device.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit  # limit in bytes; data of one `load` stays until the next
        self._bytes: OrderedDict[int, torch.Tensor] = OrderedDict()

    def load(self, looks: Iterable[Look]) -> None:
        """Fetch the storages of the values in `looks`, unless they are cached."""
        wanted: dict[int, Look] = {}
        unchanged: set[int] = set()
        for value, meta in looks:
            storage = value.storage.id
            here = self._bytes.get(storage)
            if here is not None and here.nbytes >= _end(meta):
                unchanged.add(storage)
            elif storage not in wanted or _end(wanted[storage][1]) < _end(meta):
                wanted[storage] = value, meta
        self._trim(unchanged)
        flat = [memory_between(value, 0, _end(meta)) for value, meta in wanted.values()]
        for storage, fetched in zip(wanted, fetch_all(flat), strict=True):
            self._bytes[storage] = fetched.clone()

    def pop(self, storage: int) -> torch.Tensor | None:
        """Remove and return the copy of a storage that is about to be written."""
        return self._bytes.pop(storage, None)

    def of(self, storage: int) -> torch.Tensor:
        """Return the loaded copy of a storage."""
        return self._bytes[storage]

    def _trim(self, kept: set[int]) -> None:
        total = sum(copy.nbytes for copy in self._bytes.values())
        for storage in list(self._bytes):
            if storage in kept:
                self._bytes.move_to_end(storage)
            elif total > self._limit:
                total -= self._bytes.pop(storage).nbytes


def _end(meta: TensorMeta) -> int:
    return meta.extent * meta.dtype.itemsize
