"""Tensors over given storages: `tensor.set_(storage)`, and with it `torch.load(map_location="remote_accelerator:0")`."""

from __future__ import annotations

from typing import Any

import torch

from djinn_core.errors import UnsupportedOperation
from djinn_core.interception.dispatch import handles, record
from djinn_core.interception.lazy_tensor import DEVICE_NAME, LazyTensor, device_type, logical_device
from djinn_core.interception.remote_storage import RemoteStorage
from djinn_core.interception.upload import upload_copy

aten = torch.ops.aten
_PRIORITY = 15  # before PyTorch's own rule for such devices, which would copy into memory that is not there


def register() -> None:
    """Have `torch.load` place storages on remote devices."""
    torch.serialization.register_package(_PRIORITY, lambda _: None, place)


def place(storage: Any, location: str) -> RemoteStorage | None:
    """The storage of that content on the remote device `location`; None where that is another device."""
    name, _, index = location.partition(":")
    if name not in (DEVICE_NAME, device_type()):
        return None
    return RemoteStorage.of_bytes(storage, logical_device(int(index or 0)))


@handles(aten.set_.source_Tensor, aten.set_.source_Tensor_storage_offset)
def set_to_tensor(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """`target.set_(source, ...)`: from now on `target` looks into the storage of `source`."""
    source = args[1]
    layout = args[2:] if len(args) > 2 else (source.storage_offset(), source.shape, source.stride())
    return _look_into(args[0], source, *layout)


@handles(aten.set_.source_Storage, aten.set_.source_Storage_storage_offset)
def set_to_storage(func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """`target.set_(storage, ...)`: likewise.

    Raises:
        UnsupportedOperation: the storage is not a remote one.
    """
    target, storage = args[0], args[1]
    if not isinstance(storage, RemoteStorage):
        raise UnsupportedOperation(f"{func.name()}: a {target.device} tensor cannot look into memory of this machine")
    base = _base(storage, target.dtype)
    layout = args[2:] if len(args) > 2 else (0, (storage.nbytes() // target.dtype.itemsize,), (1,))
    return _look_into(target, base, *layout)


def _base(storage: RemoteStorage, dtype: torch.dtype) -> LazyTensor:
    """A tensor of `dtype` over `storage`, whose content is uploaded when the first is made."""
    if storage.base is None:
        assert storage.source is not None
        whole = torch.empty(0, dtype=dtype, device="cpu").set_(storage.source)
        storage.base, storage.source = upload_copy(whole, storage.device.index), None
    base: LazyTensor = storage.base.detach()
    return base if base.dtype == dtype else base.view(dtype)  # type: ignore[return-value]


def _look_into(target: LazyTensor, source: LazyTensor, offset: int, size: Any, stride: Any) -> LazyTensor:
    target.data = record(aten.as_strided.default, (source, list(size), list(stride), offset), {})
    return target
