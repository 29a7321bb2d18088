"""`tensor.pin_memory()` for the remote device: pins nothing, as bytes that go over a network gain nothing from it.

A pinned tensor is a copy that says it is pinned. What programs rely on holds: it can be sent with `non_blocking=True`, and
pinning it again returns itself.
"""

from __future__ import annotations

import torch

from djinn_core.interception.device.device_state import device_state
from djinn_core.torch_private import StorageReference, never_compiled

_SWEEP = 1024  # storages that are remembered, after which those that are gone are forgotten


def pin(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """`aten::_pin_memory`: a copy with the same strides, whose storage counts as pinned."""
    del device
    copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").copy_(tensor)
    storage = copied.untyped_storage()
    pinned = device_state.pinned
    if len(pinned) >= _SWEEP:
        for address, known in list(pinned.items()):
            if known.expired():
                pinned.pop(address, None)
    pinned[storage.data_ptr()] = StorageReference(storage)
    return copied


def is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    """`aten::is_pinned`: whether `pin` made the memory that a CPU tensor looks into."""
    del device
    if not device_state.pinned or tensor.layout is not torch.strided:
        return False
    known = device_state.pinned.get(tensor.untyped_storage().data_ptr())
    return known is not None and not known.expired()


def register() -> torch.library.Library:
    """Register both; they stay as long as the returned object lives."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_pin_memory", never_compiled(pin), "CPU")
    library.impl("is_pinned", never_compiled(is_pinned), "CPU")
    return library
