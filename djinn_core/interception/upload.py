"""Tensor data on its way out: CPU tensors become remote values."""

from __future__ import annotations

import torch

from djinn_core.interception.lazy_tensor import LazyTensor, wrap
from djinn_core.interception.port import port
from djinn_core.interception.recorder import current
from djinn_core.interception.storage import Storage, Value
from djinn_core.ir.values import contiguous_strides, tensor_meta

_EMPTY = frozenset({"aten::empty.memory_format", "aten::empty_strided"})


def upload_copy(source: torch.Tensor, device: int = 0) -> LazyTensor:
    """A new contiguous remote tensor with the elements of `source`."""
    shape = tuple(source.shape)
    meta = tensor_meta(shape, contiguous_strides(shape), 0, source.dtype, device)
    value = Value(Storage(meta.nbytes, None), meta)
    _send(value.handle, source.detach().resolve_conj().resolve_neg().contiguous())
    return wrap(value)


def upload_into_new(target: LazyTensor, source: torch.Tensor) -> bool:
    """Make `source` the content of `target` where `target` was made by the last instruction, in its place.

    `.to(device)` is an `empty` and a `copy_`; this turns both into one upload. Returns whether it applied.
    """
    recorder = current()
    meta = target.remote.meta
    if not recorder.entries or source.dtype != meta.dtype or tuple(source.shape) != meta.shape or meta.offset:
        return False
    call, handles, *_ = recorder.entries[-1]
    if call.op not in _EMPTY or handles != (target.remote.handle,):
        return False
    if meta.extent * meta.dtype.itemsize != meta.nbytes:
        return False  # not dense: padding would travel
    plain = source.detach().resolve_conj().resolve_neg()
    if plain.stride() != meta.stride:
        plain = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="cpu").copy_(plain)
    recorder.entries.pop()
    target.remote.storage.written = None
    _send(target.remote.handle, plain)
    return True


def _send(handle: int, source: torch.Tensor) -> None:
    """Upload now; inside `capture()` only where a session is open, since capturing needs no server."""
    port.upload(handle, source, hold=bool(current().captures))
