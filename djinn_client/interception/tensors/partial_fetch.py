"""Partial fetches: single elements are fetched with their page, and a large tensor in several messages.

Each fetch is a round trip. At the third fetch from an unwritten page, the client fetches the whole page. It then serves
further parts from that copy. A small storage is fetched whole at its first partial fetch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from djinn_client.interception.dispatch import record
from djinn_client.interception.shape_inference.meta_infer import order_of
from djinn_client.interception.tensors.known_contents import Page
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, wrap
from djinn_client.interception.tensors.storage import Value
from djinn_core.errors import RemoteError
from djinn_core.ir.values import TensorMeta

aten: Final = torch.ops.aten
_conj, _neg_view = (
    getattr(aten, name).default for name in ("_conj", "_neg_view")
)  # names of ops, not private functions
PART_BYTES: Final = 256 << 20  # bytes of one message
PAGE: Final = 1 << 16  # bytes: about as many as most links carry in one round-trip time
SMALL_PART: Final = 4  # minimum ratio of page size to part size
# size limit in bytes of elements that may be cached, because they are copied for the program
SHARED_BYTES: Final = PAGE // SMALL_PART
_FETCHES: Final = 2  # parts of a page that are fetched separately first
_SMALL: Final = 4096  # size limit in bytes of a storage that is fetched whole


def memory_between(value: Value, start: int, end: int) -> LazyTensor:
    """Return the bytes from `start` to `end` of a value's memory as a 1-dim tensor. `start` is a multiple of 16."""
    meta, tensor = value.meta, wrap(value)
    if meta.conj:
        tensor = record(_conj, (tensor,), {})
    if meta.neg:
        tensor = record(_neg_view, (tensor,), {})
    size = meta.dtype.itemsize
    return record(aten.as_strided.default, (tensor, [-(-(end - start) // size)], [1], start // size), {})  # type: ignore[no-any-return]


def view_of(copy: torch.Tensor, meta: TensorMeta, start: int = 0) -> torch.Tensor:
    """Return a view of `copy` with the metadata `meta`. `copy` has the value's memory from byte `start` on."""
    offset = meta.offset - start // meta.dtype.itemsize
    if copy.dtype == meta.dtype and not meta.conj and not meta.neg:  # the usual case
        return copy.as_strided(meta.shape, meta.stride, offset)
    with torch.inference_mode():
        view = torch.empty(0, dtype=meta.dtype, device="cpu").set_(
            copy.untyped_storage(), offset, meta.shape, meta.stride
        )
        if meta.conj:
            view = torch.conj(view)
        return _neg_view(view) if meta.neg else view


def part_of(value: Value, read: Callable[[Value], torch.Tensor]) -> torch.Tensor | None:
    """Return the read-only elements of `value`, or None if it is not a small part of one page of `PAGE` bytes.

    `read`: fetches the value, or the whole page.

    Raises:
        RemoteError: the elements could not be computed.
    """
    meta, storage = value.meta, value.storage
    nbytes, page = storage.nbytes, meta.offset * meta.dtype.itemsize // PAGE
    # Values whose size only the executor knows, such as random states, cannot be read in parts.
    if not 0 < meta.nbytes * SMALL_PART <= min(nbytes, PAGE):
        return None
    if nbytes > PAGE and page != (meta.extent * meta.dtype.itemsize - 1) // PAGE:
        return None
    contents = storage.contents
    memory = contents.copies.get(Page(page))
    if memory is None:
        contents.fetches[page] = count = contents.fetches.get(page, 0) + 1
        if count <= _FETCHES and nbytes > _SMALL:
            return read(value)
        try:
            memory = read(memory_between(value, page * PAGE, min(nbytes, (page + 1) * PAGE)).remote).clone()
        except RemoteError:  # elements of this part, or of one that the program did not read
            return read(value)
        contents.keep(Page(page), memory)
    return view_of(memory, meta, page * PAGE)


def fetch_in_parts(tensor: LazyTensor, read: Callable[[Value], torch.Tensor]) -> torch.Tensor:
    """Return the tensor's elements on the CPU, fetched part by part. A dense tensor keeps its strides."""
    meta = tensor.remote.meta
    flat, stride = _flattened(tensor)
    whole = torch.empty(meta.numel, dtype=meta.dtype, device="cpu")
    step = PART_BYTES // meta.dtype.itemsize
    for start in range(0, meta.numel, step):
        part = record(aten.slice.Tensor, (flat, 0, start, min(start + step, meta.numel)), {})
        whole[start : start + step] = read(part.remote)
    return whole.as_strided(meta.shape, stride)


def _flattened(tensor: LazyTensor) -> tuple[LazyTensor, tuple[int, ...]]:
    """Return the elements in one dimension, and the strides with which they have the shape of `tensor` again.

    The elements of a dense tensor are in memory order, those of other tensors in row-major order.
    """
    meta = tensor.remote.meta
    if order_of(meta.shape, meta.stride) is not None:
        return record(aten.as_strided.default, (tensor, [meta.numel], [1], meta.offset), {}), meta.stride
    dense = record(aten.clone.default, (tensor,), {"memory_format": torch.contiguous_format})
    return record(aten.view.default, (dense, [meta.numel]), {}), dense.stride()
