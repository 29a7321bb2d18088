"""Chunked fetch of large tensors: elements beyond the size of one message come in further ones."""

from __future__ import annotations

from collections.abc import Callable

import torch

from djinn_client.interception.dispatch import record
from djinn_client.interception.shape_inference.meta_infer import order_of
from djinn_client.interception.tensors.lazy_tensor import LazyTensor

aten = torch.ops.aten

PART_BYTES = 256 << 20


def fetch_in_parts(tensor: LazyTensor, fetch: Callable[[LazyTensor], torch.Tensor]) -> torch.Tensor:
    """The tensor's elements on the CPU, fetched part after part; a dense tensor keeps its strides."""
    meta = tensor.remote.meta
    flat, stride = _flattened(tensor)
    whole = torch.empty(meta.numel, dtype=meta.dtype, device="cpu")
    step = PART_BYTES // meta.dtype.itemsize
    for start in range(0, meta.numel, step):
        part = record(aten.slice.Tensor, (flat, 0, start, min(start + step, meta.numel)), {})
        whole[start : start + step] = fetch(part)
    return whole.as_strided(meta.shape, stride)


def _flattened(tensor: LazyTensor) -> tuple[LazyTensor, tuple[int, ...]]:
    """The elements in one dimension, in the order of memory where there are no gaps, and the strides that this means."""
    meta = tensor.remote.meta
    if order_of(meta.shape, meta.stride) is not None:
        return record(aten.as_strided.default, (tensor, [meta.numel], [1], meta.offset), {}), meta.stride
    dense = record(aten.clone.default, (tensor,), {"memory_format": torch.contiguous_format})
    return record(aten.view.default, (dense, [meta.numel]), {}), dense.stride()
