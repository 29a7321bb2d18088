"""`storage.is_remote_accelerator` and `storage.remote_accelerator()`, as storages have for every accelerator."""

from __future__ import annotations

from typing import Any

import torch

from djinn_core.interception.device.current_device import index_of
from djinn_core.interception.device.device_state import DEVICE_NAME
from djinn_core.interception.tensors.lazy_tensor import is_remote, logical_device
from djinn_core.interception.tensors.remote_storage import RemoteStorage


def _is_here(storage: torch.UntypedStorage | torch.TypedStorage) -> bool:
    return is_remote(storage.device)


def _to_remote(storage: torch.UntypedStorage, device: Any = None, non_blocking: bool = False) -> torch.UntypedStorage:
    """The storage itself where it is remote, otherwise a remote one with a copy of its bytes."""
    del non_blocking
    index = index_of(device)
    if is_remote(storage.device):
        return storage
    return RemoteStorage.of_bytes(storage.clone(), logical_device(index))


def _typed_to_remote(storage: Any, device: Any = None, non_blocking: bool = False) -> torch.TypedStorage:
    moved = _to_remote(storage.untyped(), device, non_blocking)
    return torch.TypedStorage(wrap_storage=moved, dtype=storage.dtype, _internal=True)


def _wrapping_remote(plain: Any) -> Any:
    """`TypedStorage._new_wrapped_storage`, by which copies are made: it takes objects of PyTorch's own class alone."""

    def wrap_storage(storage: Any, untyped: torch.UntypedStorage) -> Any:
        if isinstance(untyped, RemoteStorage):
            return torch.TypedStorage(wrap_storage=untyped, dtype=storage.dtype, _internal=True)
        return plain(storage, untyped)

    return wrap_storage


def install() -> None:
    """Give PyTorch's storages these methods."""
    typed: Any = torch.TypedStorage
    typed._new_wrapped_storage = _wrapping_remote(typed._new_wrapped_storage)  # noqa: SLF001 - nothing public makes copies
    for kind, move in ((torch.UntypedStorage, _to_remote), (torch.TypedStorage, _typed_to_remote)):
        setattr(kind, f"is_{DEVICE_NAME}", property(_is_here))
        setattr(kind, DEVICE_NAME, move)
