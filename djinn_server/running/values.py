"""The values of one session on an executor: tensors by handle, with poison for failed values."""

from __future__ import annotations

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
    """Replacement of a value that could not be computed. Every result of an op that uses it becomes poison, too.

    Attributes:
        memory: the tensor before a write to it failed, whose contents must not be read; None if it never
            was one. An op that overwrites all of it makes it a value again.
    """

    failure: Failure
    memory: torch.Tensor | None = None

    def again(self, address: int) -> torch.Tensor | Poison:
        """Return the original tensor if its memory is at `address`; otherwise this poison."""
        return self.memory if self.memory is not None and address_of(self.memory) == address else self


def no_such_value(sequence: int, handle: int) -> Failure:
    """Return the failure of submission `sequence` for a missing value."""
    reason = f"this session has no value {handle}: its tensor is gone, or was made in a session that has ended. Make or load it again"
    return Failure(sequence, -1, "", "SessionLost", reason)


# Values of ops other than tensors: scalars, random generators, events.
Stored = torch.Tensor | Poison | torch.Generator | torch.Event | bool | int | float | complex | None


def address_of(value: object) -> int:
    """Return the address of a value's memory, also for poison; 0 if it has none."""
    tensor = strided(value)
    return 0 if tensor is None else tensor.untyped_storage().data_ptr()


def memory_of(value: object) -> int:
    """Return the address of a value's memory; a negative number shared by its views without memory; 0 without storage."""
    tensor = strided(value)
    return 0 if tensor is None else tensor.untyped_storage().data_ptr() or -torch_private.storage_key(tensor)


def strided(value: object) -> torch.Tensor | None:
    """Return the tensor whose memory a value has, also for poison; None if it has none."""
    if isinstance(value, Poison):
        value = value.memory
    return value if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def has_memory(value: object) -> TypeGuard[torch.Tensor]:
    """Check whether a value is a tensor over memory that can be counted."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


class _Held(msgspec.Struct):
    """A storage by the client's numbering: the number of values that are views of it, and its size in bytes."""

    values: int = 0
    nbytes: int = 0


class MemoryIndex:
    """Handles by the storage that the client numbers, and by the address of the memory."""

    def __init__(self, values: Mapping[int, Stored]) -> None:
        self._storages: dict[int, dict[int, None]] = {}
        self._addresses: dict[int, dict[int, None]] = {}
        for handle, value in values.items():
            self.add(handle, value)

    def add(self, handle: int, value: Stored) -> None:
        """Add a value."""
        self._storages.setdefault(storage_of(handle), {})[handle] = None
        if memory := memory_of(value):
            self._addresses.setdefault(memory, {})[handle] = None

    def remove(self, handle: int, value: Stored) -> None:
        """Remove an added value. Its memory must be at the same address."""
        for index, key in ((self._storages, storage_of(handle)), (self._addresses, memory_of(value))):
            handles = index.get(key, {})
            handles.pop(handle, None)
            if not handles:
                index.pop(key, None)

    def handles(self, storage: int, address: int) -> list[int]:
        """Return the values that view `storage` or have memory at `address`."""
        return list(dict.fromkeys((*self._storages.get(storage, ()), *self._addresses.get(address, ()))))

    def moved(self, before: int, values: Mapping[int, Stored]) -> None:
        """Note that values with memory at `before` may have moved."""
        for handle in self._addresses.pop(before, ()):
            if memory := memory_of(values.get(handle)):
                self._addresses.setdefault(memory, {})[handle] = None


class Copied(Protocol):
    """Counts the growing tensors that were copied for a reader that needs dense ones."""

    copied: int


class ValueTable:
    """Values by handle.

    Attributes:
        table: the values. Only this object changes it.
        held: bytes of all held storages, on or off the device, at their sizes when they were added.
        highest: peak of `held` after a run.
        growing: tensors with spare capacity by handle, with the counter of their copies (`growing.py`). A reader that does not use
            `table` gets a dense copy.
    """

    def __init__(self) -> None:
        self.table: dict[int, Stored] = {}
        self._index: MemoryIndex | None = None  # from the first write that fails on
        self._storages: dict[int, _Held] = {}
        self.held = 0
        self.highest = 0
        self.growing: dict[int, Copied] = {}

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, handle: int) -> bool:
        return handle in self.table

    def __getitem__(self, handle: int) -> Stored:
        """Return the value. Raises: KeyError: this session has no such value."""
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
        if type(value) is torch.Tensor and value.layout is torch.strided:  # as nearly all are
            nbytes = value.untyped_storage().nbytes()
        else:
            nbytes = value.untyped_storage().nbytes() if has_memory(value) else 0
        storages = self._storages
        if storage in storages:
            held = storages[storage]
        else:
            held = storages[storage] = _Held()
        if handle not in self.table:
            held.values += 1
        if self._index is not None:
            if handle in self.table:
                self._index.remove(handle, self.table[handle])
            self._index.add(handle, value)
        if self.growing:
            self.growing.pop(handle, None)
        self.table[handle] = value
        if nbytes > held.nbytes:
            self.held += nbytes - held.nbytes
            held.nbytes = nbytes

    def count(self, handle: int, nbytes: int) -> None:
        """Count a value's storage as `nbytes` bytes, which are off the device now."""
        held = self._storages[storage_of(handle)]
        if nbytes > held.nbytes:
            self.held += nbytes - held.nbytes
            held.nbytes = nbytes

    def free(self, handles: Iterable[int]) -> None:
        """Free values. Unknown handles are ignored."""
        for handle in handles:
            value: Any = self.table.pop(handle, self)  # itself: there is none
            if value is not self:
                if self._index is not None:
                    self._index.remove(handle, value)
                if self.growing:
                    self.growing.pop(handle, None)
                storage = handle >> VIEW_BITS
                held = self._storages[storage]
                held.values -= 1
                if not held.values:
                    self.held -= held.nbytes
                    del self._storages[storage]

    def bytes_of(self, storage: int) -> int:
        """Return the bytes of a storage by the client's number, on or off the device; 0 if no value views it."""
        held = self._storages.get(storage)
        return held.nbytes if held is not None else 0

    def peak(self, nbytes: int) -> int:
        """Return the peak of bytes held after runs and now (`nbytes`)."""
        self.highest = max(self.highest, nbytes)
        return self.highest

    def reset_peak(self) -> None:
        """Reset the peak."""
        self.highest = 0

    @property
    def indexed(self) -> bool:
        """True if `sharing_memory` keeps an index."""
        return self._index is not None

    def sharing_memory(self, storage: int, address: int) -> list[int]:
        """Return the handles of values that view a storage (by the client's number) or have memory at `address`."""
        if self._index is None:
            self._index = MemoryIndex(self.table)
        return self._index.handles(storage, address)

    def moved(self, before: int) -> None:
        """Note that values with memory at `before` may have moved."""
        if self._index is not None:
            self._index.moved(before, self.table)

    def forget_addresses(self) -> None:
        """Note that the memory of any value may have moved."""
        self._index = None

    def poison_storage(self, handle: int, address: int, failure: Failure) -> None:
        """Poison every value that shares memory with `handle`, whose memory is at `address`, after a write failed halfway.

        The address finds values that share the memory without being views of one tensor.
        """
        self.poison(list(self.table), storage_of(handle), address, failure)

    def poison(self, handles: Iterable[int], storage: int, address: int, failure: Failure) -> None:
        """Poison as `poison_storage` does, but only among `handles`."""
        for handle in handles:
            if handle not in self.table:
                continue  # it is gone
            value = self.table[handle]
            if storage_of(handle) == storage or (address and address_of(value) == address):
                memory = value if isinstance(value, torch.Tensor) else None
                self.table[handle] = value if isinstance(value, Poison) else Poison(failure, memory)

    def restore(self, handles: Iterable[int], address: int) -> None:
        """Restore the values among `handles` whose poison has the memory at `address`, because it was overwritten completely."""
        for handle in handles:
            value = self.table.get(handle)
            if isinstance(value, Poison):
                self.table[handle] = value.again(address)

    def items(self) -> list[tuple[int, Stored]]:
        """Return handles and values, growing tensors without a dense copy."""
        return list(self.table.items())

    def sharing(self, storages: Container[int]) -> list[int]:
        """Return the handles of values that view one of these storages (by the client's numbers)."""
        return [handle for handle in list(self.table) if storage_of(handle) in storages]

    def everything(self) -> list[tuple[int, Stored]]:
        """Return all values by handle, with dense copies of growing tensors."""
        self.densify(self.growing)
        return list(self.table.items())

    def tensors(self) -> list[torch.Tensor]:
        """Return the values that are tensors."""
        return [v for v in list(self.table.values()) if isinstance(v, torch.Tensor)]

    def poisoned(self) -> int:
        """Number of poisoned values."""
        return sum(isinstance(value, Poison) for value in list(self.table.values()))

    def nbytes(self) -> int:
        """Return the bytes of distinct storages."""
        return sum(self.sizes().values())

    def sizes(self) -> dict[int, int]:
        """Return the bytes of distinct storages, by address."""
        return {storage.data_ptr(): storage.nbytes() for storage in [t.untyped_storage() for t in self.tensors()]}

    def clear(self) -> None:
        """Free all values."""
        self.table.clear()
        self.growing.clear()
        self._index = None
        self._storages.clear()
        self.held = 0
