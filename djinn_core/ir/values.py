"""Metadata of remote tensors, known to the client without a message."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from typing import Any, Final

import attrs
import torch

from djinn_core.system.processes import in_forked_child


@attrs.frozen(eq=False)
class TensorClass:
    """The metadata of a tensor without sizes and offset. It is the key of formulas for results, layouts and plans.

    Attributes:
        dtype: as in `TensorMeta`.
        device: as in `TensorMeta`.
        conj: as in `TensorMeta`.
        neg: as in `TensorMeta`.
        small: each size of 0 or 1, which kernels treat specially; -1 for every other size.
        order: the dimensions from the outermost in memory to the innermost.
        expanded: dimensions of stride 0.
        dense: True if the tensor has no gaps.
        regular: True if the strides follow from the sizes and `order`. Dimensions of size 1 may have any stride, and
            copies keep it.
    """

    dtype: torch.dtype
    device: int
    conj: bool
    neg: bool
    small: tuple[int, ...]
    order: tuple[int, ...]
    expanded: tuple[bool, ...]
    dense: bool
    regular: bool


@attrs.frozen(eq=False)
class TensorMeta:
    """Metadata of a tensor.

    Instances come from `tensor_meta`, which interns them. Equal metadata is the same object, so it is a cheap key.

    Attributes:
        shape: sizes.
        stride: strides, in elements.
        offset: storage offset, in elements.
        dtype: a `torch.dtype`.
        device: index of the logical device.
        conj: True for a lazily conjugated view.
        neg: True for a lazily negated view.
        numel: number of elements.
        nbytes: bytes of the elements, if contiguous.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: int = 0
    conj: bool = False
    neg: bool = False
    numel: int = attrs.field(init=False, repr=False)
    nbytes: int = attrs.field(init=False, repr=False)
    # Not cached properties: attrs would give the class a `__getattr__`, which slows down every field access.
    _class: TensorClass | None = attrs.field(default=None, init=False, repr=False)
    _extent: int | None = attrs.field(default=None, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        # Most instances need these values. Programs of varying sizes make many instances, and a property costs more
        # than the values.
        numel = math.prod(self.shape)
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "nbytes", numel * self.dtype.itemsize)

    @property
    def tensor_class(self) -> TensorClass:
        """The metadata without sizes and offset (`TensorClass`). Interned: equal classes are the same object."""
        tensor_class = self._class
        if tensor_class is None:
            tensor_class = _class_of(self)
            object.__setattr__(self, "_class", tensor_class)
        return tensor_class

    @property
    def extent(self) -> int:
        """Number of storage elements up to the last viewed element."""
        extent = self._extent
        if extent is None:
            extent = 0
            if self.numel:
                extent = self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
            object.__setattr__(self, "_extent", extent)
        return extent


CLASSES_LIMIT: Final = 65536  # interned classes; the table is cleared at this size
_classes: dict[tuple[object, ...], TensorClass] = {}


def _class_of(meta: TensorMeta) -> TensorClass:
    shape, stride = meta.shape, meta.stride
    small = tuple([n if n < 2 else -1 for n in shape])
    if 0 not in small and stride == contiguous_strides(shape):
        order, expanded, dense, regular = tuple(range(len(shape))), (False,) * len(shape), True, True
    else:
        # If strides are equal, kernels order dimensions by size.
        order = tuple(sorted(range(len(shape)), key=lambda d: (-stride[d], -shape[d] if stride[d] else 0, d)))
        expanded = tuple([step == 0 for step in stride])
        dense = meta.extent == meta.offset + meta.numel
        regular = tuple([stride[d] for d in order]) == contiguous_strides(tuple([shape[d] for d in order]))
    key = (meta.dtype, meta.device, meta.conj, meta.neg, small, order, expanded, dense, regular)
    tensor_class = _classes.get(key)
    if tensor_class is None:
        if len(_classes) >= CLASSES_LIMIT:
            _classes.clear()
        tensor_class = _classes.setdefault(key, TensorClass(*key))  # in the order of its fields
    return tensor_class


_intern_lock = threading.RLock()  # reentrant: finalizers run anywhere
# Like a `WeakValueDictionary`, whose lookup of a missing key takes longer than making the metadata.
_interned: dict[tuple[object, ...], weakref.KeyedRef[tuple[object, ...], TensorMeta]] = {}


def tensor_meta(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: int = 0,
    conj: bool = False,
    neg: bool = False,
) -> TensorMeta:
    """Return the interned `TensorMeta` with these fields."""
    key = (shape, stride, offset, dtype, device, conj, neg)
    reference = _interned.get(key)
    meta = reference() if reference is not None else None
    return _intern(key) if meta is None else meta


def _intern(key: tuple[Any, ...]) -> TensorMeta:
    with _intern_lock:
        reference = _interned.get(key)
        meta = reference() if reference is not None else None
        if meta is None:
            meta = TensorMeta(*key)
            _interned[key] = weakref.KeyedRef(meta, _forget, key)
        return meta


def _forget(reference: weakref.KeyedRef[tuple[object, ...], TensorMeta]) -> None:
    # Do not wait for the lock: finalizers run anywhere, also under other locks. A remaining entry is replaced when the
    # same metadata comes again.
    if _intern_lock.acquire(blocking=False):
        try:
            if _interned.get(reference.key) is reference:
                del _interned[reference.key]
        finally:
            _intern_lock.release()


def _restart_interning() -> None:
    """Replace the lock in a forked child: a thread of the parent may have held it."""
    global _intern_lock
    _intern_lock = threading.RLock()


in_forked_child(_restart_interning)


def meta_of(tensor: torch.Tensor, device: int = 0) -> TensorMeta:
    """Return the metadata of a strided tensor, as a value on logical device `device`."""
    return tensor_meta(
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        device,
        tensor.is_conj(),
        tensor.is_neg(),
    )


@functools.lru_cache(maxsize=1 << 13)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row-major strides (in elements) of a new tensor of `shape`."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
