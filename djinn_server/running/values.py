"""The values of a session on an executor: tensors by handle. A value that could not be computed is poison."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Mapping
from typing import Any, Protocol, TypeGuard

import attrs
import msgspec
import torch

from djinn_core import torch_private
from djinn_core.ir.handles import VIEW_BITS, storage_of
from djinn_core.wire.message_base import Failure


@attrs.frozen
class Poison:
    """Placeholder for a value that could not be computed. Results of ops that use it become poison, too.

    Attributes:
        failure: the error, which a fetch of the value raises.
        memory: the tensor that a failed op may have half written; None if there was no tensor. Its contents must not be
            read. An op that overwrites all of this tensor makes the value valid again.
    """

    failure: Failure
    memory: torch.Tensor | None = None

    def tensor_at(self, address: int) -> torch.Tensor | Poison:
        """Return the half-written tensor (`memory`) if its memory is at `address`, else this poison."""
        return self.memory if self.memory is not None and address_of(self.memory) == address else self


def no_such_value(sequence: int, handle: int) -> Failure:
    """Return the failure of submission `sequence`, which used a handle without a value."""
    reason = (
        f"this session has no value {handle}: its tensor was freed, or was made in a session that has ended. Make or load "
        "the tensor again"
    )
    return Failure(sequence, -1, "", "SessionLost", reason)


# Values of ops other than tensors: scalars, random generators, events.
Stored = torch.Tensor | Poison | torch.Generator | torch.Event | bool | int | float | complex | None


def address_of(value: object) -> int:
    """Return the address of a value's memory, or 0 if it has none. Poison has the address of its tensor."""
    tensor = strided(value)
    return 0 if tensor is None else tensor.untyped_storage().data_ptr()


def memory_of(value: object) -> int:
    """Return a number that identifies a value's storage: the address of its memory.

    A storage without memory has a negative number. A value without storage gives 0.
    """
    tensor = strided(value)
    return 0 if tensor is None else tensor.untyped_storage().data_ptr() or -torch_private.storage_key(tensor)


def strided(value: object) -> torch.Tensor | None:
    """Return a value if it is a strided tensor. For poison, return `Poison.memory` if that is one. Else return None."""
    if isinstance(value, Poison):
        value = value.memory
    return value if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def has_memory(value: object) -> TypeGuard[torch.Tensor]:
    """Return True if a value is a strided tensor, whose bytes can be counted."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


class _StorageEntry(msgspec.Struct):
    """A storage of the client.

    Attributes:
        values: number of values that view the storage.
        nbytes: its size in bytes.
    """

    values: int = 0
    nbytes: int = 0


class MemoryIndex:
    """Index of handles by the client's number of the storage, and by memory (`memory_of`)."""

    def __init__(self, values: Mapping[int, Stored]) -> None:
        self._storages: dict[int, dict[int, None]] = {}
        self._addresses: dict[int, dict[int, None]] = {}
        for handle, value in values.items():
            self.add(handle, value)

    def add(self, handle: int, value: Stored) -> None:
        """Add a value to the index."""
        self._storages.setdefault(storage_of(handle), {})[handle] = None
        if memory := memory_of(value):
            self._addresses.setdefault(memory, {})[handle] = None

    def remove(self, handle: int, value: Stored) -> None:
        """Remove a value. Its memory must be at the address at which it was added."""
        for index, key in ((self._storages, storage_of(handle)), (self._addresses, memory_of(value))):
            handles = index.get(key, {})
            handles.pop(handle, None)
            if not handles:
                index.pop(key, None)

    def handles(self, storage: int, address: int) -> list[int]:
        """Return the handles of values that view `storage` (the client's number) or have memory at `address`."""
        return list(dict.fromkeys((*self._storages.get(storage, ()), *self._addresses.get(address, ()))))

    def on_reallocation(self, before: int, values: Mapping[int, Stored]) -> None:
        """Update the index for values whose memory was at address `before`, because they may have been reallocated."""
        for handle in self._addresses.pop(before, ()):
            if memory := memory_of(values.get(handle)):
                self._addresses.setdefault(memory, {})[handle] = None


class CopyCounter(Protocol):
    """Counter of growing tensors that were copied to dense memory.

    Attributes:
        copied: number of copies.
    """

    copied: int


class ValueTable:
    """The values of a session by handle.

    Attributes:
        table: the values. Only this object changes it.
        held_bytes: bytes of all storages, on or off the device. A storage counts with the size that it had when a value was
            added.
        peak_bytes: peak of `held_bytes` after runs, since `reset_peak`.
        lock: lock for changes of the table while runs of the session are in lanes.
        growing: counters of copies of the tensors with spare capacity (`growing.py`), by handle. `table`,
            `items` and `tensors` return such tensors, all other readers get dense copies.
    """

    def __init__(self) -> None:
        self.table: dict[int, Stored] = {}
        self._index: MemoryIndex | None = None  # made at the first failure of a write
        self._storages: dict[int, _StorageEntry] = {}
        self.held_bytes = 0
        self.peak_bytes = 0
        self.lock = threading.Lock()
        self.growing: dict[int, CopyCounter] = {}

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, handle: int) -> bool:
        return handle in self.table

    def __getitem__(self, handle: int) -> Stored:
        """Return the value with a handle.

        Raises:
            KeyError: the session has no such value.
        """
        if handle in self.growing:
            self.densify((handle,))
        return self.table[handle]

    def densify(self, handles: Iterable[int]) -> None:
        """Copy the growing tensors among `handles` to dense memory, with the layout that the client knows."""
        for handle in self.growing.keys() & set(handles):
            value = self.table[handle]
            self.growing[handle].copied += 1
            assert isinstance(value, torch.Tensor)
            try:
                with torch_private.inference_mode(True):
                    self[handle] = value.clone(memory_format=torch.contiguous_format)
            except RuntimeError as error:
                self[handle] = Poison(Failure(0, -1, "aten::clone", type(error).__name__, str(error)))

    def __setitem__(self, handle: int, value: Stored) -> None:
        storage = handle >> VIEW_BITS
        if type(value) is torch.Tensor and value.layout is torch.strided:  # a fast path for most values
            nbytes = value.untyped_storage().nbytes()
        else:
            nbytes = value.untyped_storage().nbytes() if has_memory(value) else 0
        storages = self._storages
        if storage in storages:
            storage_entry = storages[storage]
        else:
            storage_entry = storages[storage] = _StorageEntry()
        if handle not in self.table:
            storage_entry.values += 1
        if self._index is not None:
            if handle in self.table:
                self._index.remove(handle, self.table[handle])
            self._index.add(handle, value)
        if self.growing:
            self.growing.pop(handle, None)
        self.table[handle] = value
        if nbytes > storage_entry.nbytes:
            self.held_bytes += nbytes - storage_entry.nbytes
            storage_entry.nbytes = nbytes

    def count_storage(self, handle: int, nbytes: int) -> None:
        """Count a value's storage with at least `nbytes` bytes, because the storage is off the device now."""
        entry = self._storages[storage_of(handle)]
        if nbytes > entry.nbytes:
            self.held_bytes += nbytes - entry.nbytes
            entry.nbytes = nbytes

    def free(self, handles: Iterable[int]) -> None:
        """Free values. Unknown handles are ignored."""
        for handle in handles:
            value: Any = self.table.pop(handle, self)  # `self` stands for a missing value, because None is a value
            if value is not self:
                if self._index is not None:
                    self._index.remove(handle, value)
                if self.growing:
                    self.growing.pop(handle, None)
                storage = handle >> VIEW_BITS
                entry = self._storages[storage]
                entry.values -= 1
                if not entry.values:
                    self.held_bytes -= entry.nbytes
                    del self._storages[storage]

    def bytes_of(self, storage: int) -> int:
        """Return the bytes of a storage, on or off the device, or 0 if no value views it.

        `storage`: the client's number.
        """
        entry = self._storages.get(storage)
        return entry.nbytes if entry is not None else 0

    def peak(self, nbytes: int) -> int:
        """Raise the peak to at least `nbytes`, and return it."""
        self.peak_bytes = max(self.peak_bytes, nbytes)
        return self.peak_bytes

    def reset_peak(self) -> None:
        """Set the peak to 0."""
        self.peak_bytes = 0

    @property
    def is_indexed(self) -> bool:
        """True if an index of values by memory exists, which must be updated."""
        return self._index is not None

    def sharing_memory(self, storage: int, address: int) -> list[int]:
        """Return the handles of values that view `storage` or have memory at `address`.

        `storage`: the client's number.
        """
        if self._index is None:
            self._index = MemoryIndex(self.table)
        return self._index.handles(storage, address)

    def on_reallocation(self, before: int) -> None:
        """Update the index, because values with memory at address `before` may have been reallocated."""
        if self._index is not None:
            self._index.on_reallocation(before, self.table)

    def forget_addresses(self) -> None:
        """Drop the index, because any value may have been reallocated."""
        self._index = None

    def poison_storage(self, handle: int, address: int, failure: Failure) -> None:
        """Poison all values that share memory with the value of `handle`, after a write failed halfway.

        `address`: address of the value's memory. It finds values that share the memory but not the client's storage.
        """
        self.poison(list(self.table), storage_of(handle), address, failure)

    def poison(self, handles: Iterable[int], storage: int, address: int, failure: Failure) -> None:
        """Poison values as `poison_storage` does, but only those among `handles`."""
        for handle in handles:
            if handle not in self.table:
                continue  # the value was freed
            value = self.table[handle]
            if storage_of(handle) == storage or (address and address_of(value) == address):
                memory = value if isinstance(value, torch.Tensor) else None
                self.table[handle] = value if isinstance(value, Poison) else Poison(failure, memory)

    def restore(self, handles: Iterable[int], address: int) -> None:
        """Make poisoned values valid again, because an op overwrote the memory at `address` completely.

        `handles`: only these values.
        """
        for handle in handles:
            value = self.table.get(handle)
            if isinstance(value, Poison):
                self.table[handle] = value.tensor_at(address)

    def items(self) -> list[tuple[int, Stored]]:
        """Return all handles and values. Growing tensors are returned without a dense copy."""
        return list(self.table.items())

    def handles_of_storages(self, storages: Container[int]) -> list[int]:
        """Return the handles of values that view one of these storages (the client's numbers)."""
        return [handle for handle in list(self.table) if storage_of(handle) in storages]

    def dense_items(self) -> list[tuple[int, Stored]]:
        """Return all handles and values. Growing tensors are returned as dense copies."""
        self.densify(self.growing)
        return list(self.table.items())

    def tensors(self) -> list[torch.Tensor]:
        """Return the values that are tensors."""
        return [v for v in list(self.table.values()) if isinstance(v, torch.Tensor)]

    def poison_count(self) -> int:
        """Return the number of poisoned values."""
        return sum(isinstance(value, Poison) for value in list(self.table.values()))

    def nbytes(self) -> int:
        """Return the bytes of all storages on the device. A storage that several values share counts once."""
        return sum(self.storage_sizes().values())

    def storage_sizes(self) -> dict[int, int]:
        """Return the bytes of each storage on the device, by address."""
        return {storage.data_ptr(): storage.nbytes() for storage in [t.untyped_storage() for t in self.tensors()]}

    def clear(self) -> None:
        """Free all values."""
        self.table.clear()
        self.growing.clear()
        self._index = None
        self._storages.clear()
        self.held_bytes = 0
