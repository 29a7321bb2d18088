"""Storages of remote tensors: functions that C++ calls."""

from __future__ import annotations

from typing import Any

import torch

from djinn_client.interception.native.library import dtype_of, implement, ops

aten = torch.ops.aten
negated = aten._neg_view.default  # noqa: SLF001 - PyTorch's name of the op


def _base(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor over a whole storage. Allocate the storage's memory if necessary."""
    view: torch.Tensor | None = ops.any_view(storage)
    if view is not None:
        return view
    from djinn_client.interception.native.calls import number_of
    from djinn_client.interception.shape_inference.meta_infer import infer
    from djinn_core.ir.slot_arrays import encoded_slots

    size = [storage.nbytes()]
    kwargs = {"dtype": torch.uint8, "device": storage.device}
    call = infer(aten.empty.memory_format, (size,), kwargs, storage.device.index or 0)
    bits, kinds = encoded_slots(size)
    return ops.append_into(number_of(call), storage, bits, kinds)  # type: ignore[no-any-return]


def _view_of_storage(
    storage: torch.UntypedStorage, size: list[int], stride: list[int], offset: int, dtype: int, bits: int
) -> torch.Tensor:
    """Return a view of a storage that PyTorch created without an op."""
    view_dtype = dtype_of(dtype)
    with torch.no_grad():
        base = _base(storage)
        if base.is_conj():
            base = torch.conj(base)
        if base.is_neg():
            base = negated(base)
        if base.dtype != view_dtype:
            octets = aten.as_strided.default(base, [0], [1], 0)
            octets = octets if octets.dtype == torch.uint8 else aten.view.dtype(octets, torch.uint8)
            length = storage.nbytes() // view_dtype.itemsize * view_dtype.itemsize
            base = aten.view.dtype(aten.as_strided.default(octets, [length], [1], 0), view_dtype)
        view = aten.as_strided.default(base, size, stride, offset)
        if bits & 1:
            view = torch.conj(view)
        if bits & 2:
            view = negated(view)
        return view  # type: ignore[no-any-return]


def _resize_storage(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Resize a storage. The executor's memory only grows."""
    with torch.no_grad():
        base = _base(storage)
        allocated_bytes = ops.set_storage_size(storage, nbytes)
        if nbytes > allocated_bytes:
            octets = aten.as_strided.default(base, [0], [1], 0)
            octets = octets if octets.dtype == torch.uint8 else aten.view.dtype(octets, torch.uint8)
            aten.resize_.default(octets, [nbytes])


def register() -> None:
    """Register the functions that C++ calls."""
    implement(view_of_storage=_view_of_storage, resize_storage=_resize_storage)


def octets_of(storage: Any) -> torch.Tensor:
    """Return all bytes of a storage, or of a slice such as `storage[8:16]`, as a tensor over it."""
    whole, before = ops.whole_storage(storage)
    return _view_of_storage(whole, [storage.nbytes()], [1], before, 0, 0)
