"""Values and storages of remote tensors, as Python sees them.

C++ has the handle, the version and the metadata. Python makes an object when it asks for one.
"""

from __future__ import annotations

from typing import Any

import torch

from djinn_client.interception.native.library import ops
from djinn_client.interception.tensors.known_contents import KnownContents, known_contents
from djinn_core.ir.handles import storage_of
from djinn_core.ir.values import TensorMeta, tensor_meta


def meta_of_tensor(tensor: torch.Tensor) -> TensorMeta:
    """Metadata of a tensor of the device."""
    return tensor_meta(
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.device.index or 0,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def described(meta: TensorMeta) -> tuple[Any, ...]:
    """Metadata as C++ takes them: sizes, strides, offset, dtype, index, bits."""
    return meta.shape, meta.stride, meta.offset, meta.dtype, meta.device, meta.conj + 2 * meta.neg


class Storage:
    """Memory on the remote side that one or more values look into."""

    __slots__ = ("holder", "id", "new_nbytes")

    def __init__(self, number: int, tensor: torch.Tensor | None, new_nbytes: int = 0) -> None:
        self.id = number
        self.holder = tensor
        self.new_nbytes = new_nbytes

    @classmethod
    def begin(cls, nbytes: int) -> Storage:
        """Memory of `nbytes` bytes that `Value.begin` makes."""
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
        """Number of writes that were recorded; -1 if it is gone."""
        return int(ops.storage_version(self.id))

    @property
    def contents(self) -> KnownContents:
        """What is known of its contents from now on."""
        return known_contents.at(self.id, self.version)


class Value:
    """One remote tensor. It keeps the value: the handle is freed when neither this object nor a tensor refers to it."""

    __slots__ = ("_meta", "handle", "holder", "storage")

    def __init__(self, tensor: torch.Tensor, handle: int, meta: TensorMeta | None = None) -> None:
        """`tensor`: a tensor for the value that has no history."""
        self.holder = tensor
        self._meta = meta
        self.handle = handle
        self.storage = Storage(storage_of(handle), tensor)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Value:
        """The value that a tensor of the device stands for."""
        return cls(*ops.twin_and_handle(tensor))

    @classmethod
    def begin(cls, storage: Storage, meta: TensorMeta) -> Value:
        """A new value over `storage`, whose memory is made with its first value."""
        made = ops.new_tensor(*described(meta), storage.nbytes, storage.holder)
        value = cls(made, ops.handle(made), meta)
        if storage.holder is None:
            storage.id, storage.holder = value.storage.id, made
        return value

    @property
    def meta(self) -> TensorMeta:
        """Its metadata."""
        found = self._meta
        if found is None:
            found = self._meta = meta_of_tensor(self.holder)
        return found

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
        """True if it is owned elsewhere: its handle is not freed with it."""
        return not ops.facts(self.holder)[4]


def borrow(handle: int, meta: TensorMeta, beside: Value | None = None) -> Value:
    """The value `handle` of a program, without holding it; over the memory of `beside`, where that is another view of the same."""
    tensor = None if beside is None else beside.holder
    made = ops.borrow(handle, *described(meta), meta.extent * meta.dtype.itemsize, tensor)
    return Value(made, handle, meta)


def still_to_free() -> list[int]:
    """The handles of the values that are gone for good, which stay in the queue."""
    return list(ops.look_freed())


def live_values() -> list[tuple[int, int]]:
    """Return the handle of each value of the process that it owns, and the bytes of its storage."""
    found = ops.live_values()
    return [*zip(found[::2], found[1::2], strict=True)]
