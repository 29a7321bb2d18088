"""Handles and metadata of remote tensors, known to the client without a message."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from functools import cached_property
from typing import Final

import attrs
import torch

VIEW_BITS: Final = 32
# The number of the storage once more, in the lower bits: these decide where Python's sets and dictionaries put an int, and
# would be the same for nearly all handles, which makes every look-up several times as slow.
HANDLE_STEP: Final = (1 << VIEW_BITS) + 1


def make_handle(storage: int, view: int) -> int:
    """The handle of the `view`-th tensor over storage `storage`. Tensors that share memory share `storage_of`."""
    return storage * HANDLE_STEP + view


def storage_of(handle: int) -> int:
    """The number of the storage (the alias set) that the value `handle` looks into."""
    return handle >> VIEW_BITS


# Random state is a value like any other: a random op reads and writes this storage.
RANDOM_STATE: Final = 0
_storages = itertools.count(1)


new_storage: Final = _storages.__next__  # a storage number that this process has not used before


def new_storages(count: int) -> list[int]:
    """Allocate `count` new storage numbers."""
    return list(itertools.islice(_storages, count))


@attrs.frozen(eq=False)
class TensorClass:
    """All metadata of a tensor but its sizes: the key by which formulas for results, layouts and plans are looked up.

    Attributes:
        dtype, device, conj, neg: as in `TensorMeta`.
        small: each size that is 0 or 1, which broadcast and end loops; -1 for every other.
        order: the dimensions from the outermost in memory to the innermost. expanded: dimensions of stride 0.
        at_start: whether it begins where its storage does. dense: whether it has no gaps.
    """

    dtype: torch.dtype
    device: int
    conj: bool
    neg: bool
    small: tuple[int, ...]
    order: tuple[int, ...]
    expanded: tuple[bool, ...]
    at_start: bool
    dense: bool


@attrs.frozen(eq=False)
class TensorMeta:
    """Shape (elements), strides and offset (elements), dtype and logical device index of a value.

    Instances come from `tensor_meta`, which interns them: two are equal exactly when they are the same object, so they
    are cheap keys.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: int = 0
    conj: bool = False
    neg: bool = False
    _class: TensorClass | None = attrs.field(default=None, init=False, repr=False)

    @property
    def tensor_class(self) -> TensorClass:
        """Its class, found once; two are equal exactly when they are the same object."""
        found = self._class
        if found is None:
            found = _class_of(self)
            object.__setattr__(self, "_class", found)
        return found

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @cached_property
    def nbytes(self) -> int:
        """Bytes that the elements take when they are contiguous."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def extent(self) -> int:
        """Elements of storage from its start to the last element that is viewed."""
        if self.numel == 0:
            return 0
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))


CLASSES_LIMIT: Final = 65536  # interned classes; all are forgotten when there are as many
_classes: dict[tuple[object, ...], TensorClass] = {}


def _class_of(meta: TensorMeta) -> TensorClass:
    shape, stride = meta.shape, meta.stride
    small = tuple([n if n < 2 else -1 for n in shape])
    if 0 not in small and stride == contiguous_strides(shape):
        order, expanded, dense = tuple(range(len(shape))), (False,) * len(shape), True
    else:
        order = tuple(sorted(range(len(shape)), key=lambda d: (-stride[d], d)))
        expanded = tuple([step == 0 for step in stride])
        dense = meta.extent == meta.offset + meta.numel
    key = (meta.dtype, meta.device, meta.conj, meta.neg, small, order, expanded, meta.offset == 0, dense)
    found = _classes.get(key)
    if found is None:
        if len(_classes) >= CLASSES_LIMIT:
            _classes.clear()
        found = _classes.setdefault(key, TensorClass(*key))  # in the order of its fields
    return found


_interning = threading.RLock()  # reentrant: finalizers run anywhere
_interned: weakref.WeakValueDictionary[tuple[object, ...], TensorMeta] = weakref.WeakValueDictionary()


def tensor_meta(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: int = 0,
    conj: bool = False,
    neg: bool = False,
) -> TensorMeta:
    """The one `TensorMeta` with these fields."""
    key = (shape, stride, offset, dtype, device, conj, neg)
    meta = _interned.get(key)
    if meta is None:
        with _interning:  # a weak dictionary's `setdefault` is several steps
            meta = _interned.setdefault(key, TensorMeta(*key))
    return meta


def _restart_interning() -> None:
    """Replace the lock in a forked child: a thread that stayed in the parent may have held it."""
    global _interning
    _interning = threading.RLock()


os.register_at_fork(after_in_child=_restart_interning)


def meta_of(tensor: torch.Tensor, device: int = 0) -> TensorMeta:
    """The metadata of a strided tensor, as a value on logical device `device`."""
    return tensor_meta(
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        device,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides (elements) for `shape`, as PyTorch gives them to a new tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
