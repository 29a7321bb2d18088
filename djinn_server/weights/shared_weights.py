"""Device memory of weights that several sessions share. The memory is copied before a session writes into it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import attrs
import torch

from djinn_core import torch_private
from djinn_core.ir.handles import storage_of
from djinn_core.ir.values import meta_of
from djinn_core.wire.tensors import dtype_name
from djinn_server.memory.ledger import Ledger
from djinn_server.recovery.snapshot_format import StoredValue
from djinn_server.running.input_aliases import InputAliases
from djinn_server.running.storage_names import StorageNames
from djinn_server.running.values import Poison, ValueTable, strided


@attrs.frozen
class WeightKey:
    """Identity of a part of a tensor in weight files.

    Attributes:
        version: version of the files, as in `OpenedWeights`.
        name: name of the tensor.
        start, size: first byte of the part in the tensor, and number of bytes.
    """

    version: bytes
    name: str
    start: int
    size: int


class SharedWeights:
    """Weak references to the storages of weights that sessions have read. Thread-safe.

    Attributes:
        storages: the storages by key of the weight.
        hits: number of reads that found shared memory.
        hit_bytes: bytes of these reads.
    """

    def __init__(self) -> None:
        self.storages: weakref.WeakValueDictionary[WeightKey, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self.hits = self.hit_bytes = 0

    def find(self, key: WeightKey) -> torch.UntypedStorage | None:
        """Return the storage of a weight and count a hit. Return None if no session has the weight."""
        with self._lock:
            storage = self.storages.get(key)
            if storage is not None:
                self.hits += 1
                self.hit_bytes += key.size
            return storage

    def peek(self, key: WeightKey) -> torch.UntypedStorage | None:
        """Return the storage of a weight, as `find` does, without counting a hit."""
        with self._lock:
            return self.storages.get(key)

    def share(self, key: WeightKey, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Register the storage of a weight, and return it. If the weight has a storage already, return that one."""
        with self._lock:
            return self.storages.setdefault(key, storage)

    def nbytes(self) -> int:
        """Return the bytes of all registered storages."""
        with self._lock:
            return sum(storage.nbytes() for storage in self.storages.values())


@attrs.frozen
class Origin:
    """The part of a weight file from which a storage was read: the address of the file, and the key of the part."""

    address: str
    key: WeightKey


class SessionShares:
    """Storages of a session whose memory other sessions may share.

    Before a program writes into a shared storage, the session's values are moved to a private copy.

    Attributes:
        storages: origin of each shared storage, by the client's number of the storage; None if it may alias a weight.
        names: names of storages, or None if the device caches no results.
    """

    def __init__(self, values: ValueTable, ledger: Ledger | None = None, names: StorageNames | None = None) -> None:
        """`ledger`: the device's memory ledger, which counts shared storages once; None without eviction.

        `names`: names of storages, if the device caches results. A storage loses its name before a write.
        """
        self._values, self.names = values, names
        self._ledger = ledger
        self.storages: dict[int, Origin | None] = {}
        self._keys: dict[int, int] = {}  # PyTorch's storage key by the client's number of the storage

    def add(self, handle: int, origin: Origin | None) -> None:
        """Add the storage of a value to the shared storages.

        `origin`: the part of a file with the bytes; None: the value is an op's result that may alias a shared value.
        """
        storage, value = storage_of(handle), self._values[handle]
        self.storages[storage] = origin
        if storage not in self._keys and isinstance(value, torch.Tensor):
            self._keys[storage] = torch_private.storage_key(value)
            if self._ledger is not None:
                self._ledger.share(self._keys[storage], value.untyped_storage())

    def unmodified(self) -> list[tuple[int, torch.Tensor, Origin]]:
        """Return (handle, tensor, origin) of each value that is an unmodified weight or a view of one."""
        unmodified = []
        for handle in self._values.handles_of_storages(self.storages):
            value, origin = self._values[handle], self.storages[storage_of(handle)]
            if origin is None or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            # A result with a changed layout owns its memory, although the client numbers it as a view.
            storage_key = torch_private.storage_key(value)
            if not (value.is_conj() or value.is_neg()) and storage_key == self._keys.get(storage_of(handle)):
                unmodified.append((handle, value, origin))
        return unmodified

    def before_run(self, aliases: InputAliases, inputs: list[int], outputs: Iterable[int]) -> None:
        """Copy shared memory that a run may write. Count outputs as shared if they may alias shared memory.

        `inputs`, `outputs`: handles of the run. Inputs that the run may write lose their content names.

        Raises:
            RuntimeError, OSError: a copy cannot be made. No value was changed.
        """
        shared_storages = self.storages
        written_storages = {storage_of(inputs[position]) for position in aliases.written_inputs}.intersection(
            shared_storages
        )
        if written_storages:
            self._copy(written_storages)
        handles = tuple(outputs) if aliases.outputs else ()
        for number, sources in aliases.outputs:
            if any(storage_of(inputs[position]) in shared_storages for position in sources):
                shared_storages.setdefault(storage_of(handles[number]), None)
        if self.names and aliases.written_inputs:
            self.names.forget(
                [strided(self._values.table.get(inputs[position])) for position in aliases.written_inputs]
            )

    def forget(self, handles: Iterable[int]) -> None:
        """Drop the shared storages of freed values, unless other values view them. `handles`: the freed values."""
        for storage in self.storages.keys() & set(map(storage_of, handles)):
            if not self._values.bytes_of(storage):
                self._drop(storage)

    def clear(self) -> None:
        """Drop all shared storages."""
        for storage in list(self.storages):
            self._drop(storage)

    def _copy(self, storages: set[int]) -> None:
        by_storage: dict[tuple[int, int], list[torch.Tensor]] = {}
        for handle in self._values.handles_of_storages(storages):
            value = self._values[handle]
            if isinstance(value, Poison):  # an op that overwrites the tensor makes it valid again
                value = value.memory
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                by_storage.setdefault((storage_of(handle), torch_private.storage_key(value)), []).append(value)
        for tensors in by_storage.values():
            _give_copy(tensors, self._ledger)
        for storage in storages:
            self._drop(storage)

    def _drop(self, storage: int) -> None:
        del self.storages[storage]
        key = self._keys.pop(storage, None)
        if key is not None and self._ledger is not None:
            self._ledger.unshare(key)


def _give_copy(tensors: list[torch.Tensor], ledger: Ledger | None) -> None:
    """Copy the storage that the tensors share, and let them all view the copy. `ledger`: counts the copy, if given."""
    with torch.inference_mode():
        copy = tensors[0].untyped_storage().clone() if ledger is None else ledger.copy_storage(tensors[0])
        for tensor in tensors:
            meta = meta_of(tensor)
            tensor.set_(copy, meta.offset, meta.shape, meta.stride)


def stored_value(handle: int, value: torch.Tensor, origin: Origin) -> StoredValue:
    """Return the snapshot entry of an unmodified weight: its layout and its position in the file."""
    key = origin.key
    layout = dtype_name(value.dtype), tuple(value.shape), value.stride(), int(value.storage_offset())
    return StoredValue(handle, origin.address, key.version, key.name, key.start, key.size, *layout)
