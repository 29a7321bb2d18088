"""Values and storages of remote tensors, as Python sees them.

C++ has the handle, the version and the metadata. Python creates an object on request.
"""

from __future__ import annotations

from typing import Any

import torch

from djinn_client.interception.native.library import ops
from djinn_client.interception.tensors.known_contents import KnownContents, known_contents
from djinn_core.ir.handles import storage_of
from djinn_core.ir.values import TensorMeta, tensor_meta


def meta_of_tensor(tensor: torch.Tensor) -> TensorMeta:
    """Return the metadata of a tensor of the device."""
    return tensor_meta(
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.device.index or 0,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def encoded_meta(meta: TensorMeta) -> tuple[Any, ...]:
    """Return metadata as the C++ functions take them: sizes, strides, offset, dtype, index, conj and neg bits."""
    return meta.shape, meta.stride, meta.offset, meta.dtype, meta.device, meta.conj + 2 * meta.neg


class Storage:
    """Remote memory that one or more values use.

    Attributes:
        id: number of the storage, or -1 until its memory is allocated.
        holder: a tensor that keeps the storage alive, or None until its memory is allocated.
        new_nbytes: size in bytes before the memory is allocated.
    """

    __slots__ = ("holder", "id", "new_nbytes")

    def __init__(self, number: int, tensor: torch.Tensor | None, new_nbytes: int = 0) -> None:
        self.id = number
        self.holder = tensor
        self.new_nbytes = new_nbytes

    @classmethod
    def begin(cls, nbytes: int) -> Storage:
        """Return a storage of `nbytes` bytes, whose memory `Value.begin` allocates."""
        return cls(-1, None, nbytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Storage) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.new_nbytes if self.holder is None else int(ops.facts(self.holder)[2])

    @property
    def version(self) -> int:
        """Number of recorded writes, or -1 if the storage is dead."""
        return int(ops.storage_version(self.id))

    @property
    def contents(self) -> KnownContents:
        """Cached contents of the storage."""
        return known_contents.at(self.id, self.version)


class Value:
    """A remote tensor's value. The handle is freed when neither this object nor a tensor refers to it.

    Attributes:
        holder: a tensor for the value, without autograd history.
        handle: the value's handle.
        storage: the value's storage.
    """

    __slots__ = ("_meta", "handle", "holder", "storage")

    def __init__(self, tensor: torch.Tensor, handle: int, meta: TensorMeta | None = None) -> None:
        """Create the value. `tensor`: a tensor for the value, without autograd history."""
        self.holder = tensor
        self._meta = meta
        self.handle = handle
        self.storage = Storage(storage_of(handle), tensor)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor of the device."""
        return cls(*ops.twin_and_handle(tensor))

    @classmethod
    def begin(cls, storage: Storage, meta: TensorMeta) -> Value:
        """Return a new value over `storage`. The first value of a storage allocates its memory."""
        tensor = ops.new_tensor(*encoded_meta(meta), storage.nbytes, storage.holder)
        value = cls(tensor, ops.handle(tensor), meta)
        if storage.holder is None:
            storage.id, storage.holder = value.storage.id, tensor
        return value

    @property
    def meta(self) -> TensorMeta:
        """Metadata of the value."""
        meta = self._meta
        if meta is None:
            meta = self._meta = meta_of_tensor(self.holder)
        return meta

    @meta.setter
    def meta(self, meta: TensorMeta) -> None:
        nbytes = meta.extent * meta.dtype.itemsize
        self.holder = ops.redescribe(
            self.holder, meta.shape, meta.stride, meta.offset, meta.dtype, meta.conj + 2 * meta.neg, nbytes
        )
        self._meta = meta
        self.storage = Storage(storage_of(self.handle), self.holder)

    @property
    def borrowed(self) -> bool:
        """True if another owner frees the handle."""
        return not ops.facts(self.holder)[4]


def borrow(handle: int, meta: TensorMeta, sibling: Value | None = None) -> Value:
    """Return the value `handle` of a program without owning it. `sibling`: another value of its storage, if one is known."""
    tensor = None if sibling is None else sibling.holder
    holder = ops.borrow(handle, *encoded_meta(meta), meta.extent * meta.dtype.itemsize, tensor)
    return Value(holder, handle, meta)


def handles_to_free() -> list[int]:
    """Return the handles of dead values that are not freed yet. They stay in the queue."""
    return list(ops.look_freed())


def live_values() -> list[tuple[int, int]]:
    """Return the handles of all owned values of the process, and the bytes of their storages."""
    values = ops.live_values()
    return [*zip(values[::2], values[1::2], strict=True)]
