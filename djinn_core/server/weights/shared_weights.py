"""Memory of weights that several sessions of an executor have read: one copy, until a session writes into it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import attrs
import torch

from djinn_core import torch_private
from djinn_core.ir.values import meta_of, storage_of
from djinn_core.server.running.input_aliases import InputAliases
from djinn_core.server.running.values import Poison, ValueTable


@attrs.frozen
class WeightKey:
    """Identity of what was read: bytes of a tensor of files in one version."""

    version: bytes
    name: str
    start: int
    size: int


class SharedWeights:
    """Storages in the device's memory, by what was read into them. Thread-safe; it holds none of them itself.

    Attributes:
        hits: how often a session found what it was to read. hit_bytes: how many bytes that was.
    """

    def __init__(self) -> None:
        self._storages: weakref.WeakValueDictionary[WeightKey, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self.hits = self.hit_bytes = 0

    def find(self, key: WeightKey) -> torch.UntypedStorage | None:
        """The memory that a session has read this into; None if none holds it any more."""
        with self._lock:
            found = self._storages.get(key)
            if found is not None:
                self.hits += 1
                self.hit_bytes += key.size
            return found

    def share(self, key: WeightKey, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Share `storage` with sessions that come later; the memory to use, which is another's where that came first."""
        with self._lock:
            return self._storages.setdefault(key, storage)

    def nbytes(self) -> int:
        """Bytes of what sessions have read and not written."""
        with self._lock:
            return sum(storage.nbytes() for storage in self._storages.values())


@attrs.frozen
class Origin:
    """Place that memory was read from."""

    address: str
    key: WeightKey


class SessionShares:
    """Those storages of a session, as its client numbers them, whose memory other sessions may have as well.

    Before a program writes into one, its values get a copy of their own.
    """

    def __init__(self, values: ValueTable) -> None:
        self._values = values
        self.storages: dict[int, Origin | None] = {}
        self._addresses: dict[int, int] = {}  # of the memory that was read, by storage

    def add(self, handle: int, origin: Origin | None) -> None:
        """The memory of this value is shared; None: it is that of another value, as far as an op's schema says."""
        self.storages[storage_of(handle)] = origin
        value = self._values[handle]
        self._addresses[storage_of(handle)] = (
            value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0
        )

    def stored(self) -> list[tuple[int, torch.Tensor, Origin]]:
        """The values that are what was read, or views of it, with where it was read."""
        found = []
        for handle in self._values.sharing(self.storages):
            value, origin = self._values[handle], self.storages[storage_of(handle)]
            if origin is None or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            # A result that was laid out again has memory of its own, although the client numbers it as a view.
            here = value.untyped_storage().data_ptr()
            if not (value.is_conj() or value.is_neg()) and here == self._addresses[storage_of(handle)]:
                found.append((handle, value, origin))
        return found

    def before_run(self, aliases: InputAliases, inputs: list[int], outputs: Iterable[int]) -> None:
        """Copy what a run of a template may write, and note what its results may share.

        Raises:
            RuntimeError: there is no memory for a copy; no value was changed.
        """
        shared = self.storages
        written = {storage_of(inputs[position]) for position in aliases.written}.intersection(shared)
        if written:
            self._copy(written)
        handles = tuple(outputs) if aliases.outputs else ()
        for number, sources in aliases.outputs:
            if any(storage_of(inputs[position]) in shared for position in sources):
                shared.setdefault(storage_of(handles[number]), None)

    def forget(self, handles: Iterable[int]) -> None:
        """Forget storages that no value looks into any more, after `handles` were freed."""
        for storage in self.storages.keys() & set(map(storage_of, handles)):
            if not self._values.bytes_of(storage):
                self._drop(storage)

    def clear(self) -> None:
        """Nothing is shared."""
        self.storages.clear()
        self._addresses.clear()

    def _copy(self, storages: set[int]) -> None:
        found: dict[tuple[int, int], list[torch.Tensor]] = {}
        for handle in self._values.sharing(storages):
            value = self._values[handle]
            if isinstance(value, Poison):  # an op that overwrites all of it makes it a tensor again
                value = value.memory
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                found.setdefault((storage_of(handle), torch_private.storage_key(value)), []).append(value)
        for tensors in found.values():
            _give_copy(tensors)
        for storage in storages:
            self._drop(storage)

    def _drop(self, storage: int) -> None:
        del self.storages[storage]
        self._addresses.pop(storage, None)


def _give_copy(tensors: list[torch.Tensor]) -> None:
    """Give tensors that look into one storage a copy of it."""
    with torch.inference_mode():
        copy = tensors[0].untyped_storage().clone()
        for tensor in tensors:
            meta = meta_of(tensor)
            tensor.set_(copy, meta.offset, meta.shape, meta.stride)
