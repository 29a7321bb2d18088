"""Upload of tensor data: CPU tensors become remote values."""

from __future__ import annotations

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.interpreter_shutdown import suppress_at_shutdown
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.recorder import current
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, wrap
from djinn_client.interception.tensors.storage import Storage, Value
from djinn_core.ir.values import TensorMeta, contiguous_strides, tensor_meta
from djinn_core.system.gc_pause import collect_later
from djinn_core.system.interrupts import interrupt_mask


@torch_dispatch.without_modes
def upload_copy(source: torch.Tensor, device: int) -> LazyTensor:
    """Return a new contiguous remote tensor on a logical device with the elements of `source`."""
    plain = _plain(source).contiguous()
    shape = tuple(plain.shape)
    return _uploaded(plain, tensor_meta(shape, contiguous_strides(shape), 0, plain.dtype, device))


@torch_dispatch.without_modes
def upload_dense(source: torch.Tensor, device: int) -> LazyTensor:
    """Return a new remote tensor with the elements and strides of the dense tensor `source`."""
    plain = _plain(source)
    return _uploaded(plain, tensor_meta(tuple(plain.shape), plain.stride(), 0, plain.dtype, device))


def _uploaded(plain: torch.Tensor, meta: TensorMeta) -> LazyTensor:
    value = Value.begin(Storage.begin(meta.nbytes), meta)
    _upload(value, plain)
    return wrap(value)


@torch_dispatch.without_modes
def upload_into_new(target: LazyTensor, source: torch.Tensor) -> bool:
    """Replace the instruction that created `target` by an upload of `source`. Return True if no copy is needed any more.

    Return False if dtypes or shapes differ, `target` is not dense, or another instruction follows its creation. Upload
    nothing if `target` has no elements. `.to(device)` is an `empty` and a `copy_`, which become one upload.
    """
    meta = target.remote.meta
    source = torch_dispatch.of_own_class(source)
    if not meta.numel and tuple(source.shape) == meta.shape:
        return True
    if source.dtype != meta.dtype or tuple(source.shape) != meta.shape or meta.offset:
        return False
    if meta.extent * meta.dtype.itemsize != meta.nbytes:
        return False  # not dense: gaps would be sent
    with interrupt_mask:
        if not current().take_back(target.remote):
            return False  # the target has been used already
        plain = _plain(source)
        if plain.stride() != meta.stride:
            plain = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="cpu").copy_(plain)
        _upload(target.remote, plain)
    return True


def _upload(value: Value, plain: torch.Tensor) -> None:
    prediction = device_state.thread.predicted_fetches
    if prediction is not None and port.is_open() and (next_uploads := prediction.to_upload()):
        with interrupt_mask, suppress_at_shutdown, collect_later:
            port.sink.expect(next_uploads)
    current().upload(value.handle, plain, value.meta.device)
    ops.know_upload(value.holder, plain)


def _plain(source: torch.Tensor) -> torch.Tensor:
    """Return `source` on the CPU, as a plain tensor with no pending work."""
    return torch_dispatch.of_own_class(source).detach().cpu().resolve_conj().resolve_neg()
