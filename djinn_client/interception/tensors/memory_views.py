"""Memory that remote values look into, fetched as it is, and CPU tensors over such a copy."""

from __future__ import annotations

from typing import Final

import torch

from djinn_client.interception.dispatch import record
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, wrap
from djinn_client.interception.tensors.storage import Value
from djinn_core.ir.values import TensorMeta

aten: Final = torch.ops.aten
_conj, _neg_view = (
    getattr(aten, name).default for name in ("_conj", "_neg_view")
)  # names of ops, not private functions


def memory_between(value: Value, start: int, end: int) -> LazyTensor:
    """The bytes from `start` to `end` of the memory that a value looks into, as one dimension; `start` is a multiple of 16."""
    with torch.no_grad():
        plain: LazyTensor = wrap(value)
        if value.meta.conj:
            plain = record(_conj, (plain,), {})
        if value.meta.neg:
            plain = record(_neg_view, (plain,), {})
        size = value.meta.dtype.itemsize
        return record(aten.as_strided.default, (plain, [-(-(end - start) // size)], [1], start // size), {})  # type: ignore[no-any-return]


def view_of(copy: torch.Tensor, meta: TensorMeta, start: int = 0) -> torch.Tensor:
    """The tensor with this metadata over a copy of the memory, which begins at byte `start`."""
    with torch.inference_mode():
        view = torch.empty(0, dtype=meta.dtype, device="cpu").set_(
            copy.untyped_storage(), meta.offset - start // meta.dtype.itemsize, meta.shape, meta.stride
        )
        if meta.conj:
            view = torch.conj(view)
        return _neg_view(view) if meta.neg else view
