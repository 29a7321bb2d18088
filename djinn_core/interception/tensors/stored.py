"""Remote tensors whose contents the executor reads itself."""

from __future__ import annotations

from djinn_core import torch_private
from djinn_core.interception.recording.recorder import current
from djinn_core.interception.tensors.lazy_tensor import LazyTensor, wrap
from djinn_core.interception.tensors.storage import Storage, Value
from djinn_core.ir.stored_tensor import StoredTensor
from djinn_core.ir.values import contiguous_strides, tensor_meta


@torch_private.without_modes
def read_stored(stored: StoredTensor, device: int = 0) -> LazyTensor:
    """A new contiguous tensor of a logical device with what is stored; returns before it is read."""
    meta = tensor_meta(stored.shape, contiguous_strides(stored.shape), 0, stored.dtype, device)
    value = Value.begin(Storage.begin(meta.nbytes, None), meta)
    current().read_weights(value.handle, stored, device)
    return wrap(value)
