"""Tensors over given storages: `tensor.set_(storage)`, and with it `torch.load(map_location="remote_accelerator:0")`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from djinn_core.errors import UnsupportedOperation
from djinn_core.interception.device.device_state import DEVICE_NAME
from djinn_core.interception.dispatch import handles, record
from djinn_core.interception.tensors.lazy_tensor import LazyTensor, device_type, is_remote, logical_device
from djinn_core.interception.tensors.remote_storage import RemoteStorage, new_on
from djinn_core.ir.values import contiguous_strides
from djinn_core.torch_objects import StorageConstructor, ToDlpack, wrap_storage_constructor, wrap_to_dlpack
from djinn_core.torch_private import (
    never_compiled,
)

aten = torch.ops.aten
_PRIORITY = 15  # before PyTorch's own rule for such devices, which would copy into memory that is not there


_library = torch.library.Library("aten", "IMPL")


def register() -> None:
    """Have storages made on remote devices, and tensors over them."""
    torch.serialization.register_package(_PRIORITY, lambda _: None, place)
    wrap_storage_constructor(constructor)
    wrap_to_dlpack(share_nothing)
    _library.impl("set_.source_Tensor_storage_offset", never_compiled(set_to_part), "AutogradPrivateUse1")


def place(storage: Any, location: str) -> RemoteStorage | None:
    """The storage of that content on the remote device `location`; None if that is another device."""
    name, _, index = location.partition(":")
    if name not in (DEVICE_NAME, device_type()):
        return None
    return RemoteStorage.of_bytes(storage, logical_device(int(index or 0)))


def constructor(plain: StorageConstructor) -> StorageConstructor:
    """`torch.UntypedStorage.__new__`, which makes storages on remote devices as well."""

    @functools.wraps(plain)
    def construct(cls: type[torch.UntypedStorage], *arguments: Any, **options: Any) -> Any:
        device = options.get("device")
        if device is not None and is_remote(device := torch.device(device)):
            return new_on(logical_device(device.index or 0), arguments[0] if arguments else 0)
        return plain(cls, *arguments, **options)

    return construct


def share_nothing(plain: ToDlpack) -> ToDlpack:
    """`torch.to_dlpack`, which would hand out the address that a remote tensor does not have."""

    @functools.wraps(plain)
    def to_dlpack(tensor: torch.Tensor) -> Any:
        return tensor.__dlpack__() if isinstance(tensor, LazyTensor) else plain(tensor)

    return to_dlpack


@handles(aten.set_.source_Tensor)
def set_to_tensor(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """`target.set_(source)`: from now on `target` looks into the storage of `source`."""
    target, source = args
    return _look_into(target, source, source.storage_offset(), source.shape, source.stride())


def set_to_part(
    target: torch.Tensor, source: torch.Tensor, storage_offset: int, size: Sequence[int], stride: Sequence[int] = ()
) -> torch.Tensor:
    """`target.set_(source, offset, size, stride)`, which PyTorch would do with the storage that a remote tensor lacks."""
    steps = stride or contiguous_strides(tuple(size))
    part = source.detach().as_strided(tuple(size), tuple(steps), storage_offset)
    return aten.set_.source_Tensor(target, part)  # type: ignore[no-any-return]


@handles(aten.set_.source_Storage, aten.set_.source_Storage_storage_offset)
def set_to_storage(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`target.set_(storage, ...)`: likewise.

    Raises:
        UnsupportedOperation: the storage is not a remote one.
    """
    target, storage = args[0], args[1]
    if not isinstance(storage, RemoteStorage):
        raise UnsupportedOperation(f"{func.name()}: a {target.device} tensor cannot look into memory of this machine")
    if len(args) == 2:
        return _look_into(target, storage.look_as(target.dtype), 0, (storage.nbytes() // target.dtype.itemsize,), (1,))
    offset, size, *stride = args[2:]
    steps = (stride or [kwargs.get("stride")])[0] or contiguous_strides(tuple(size))
    return _look_into(target, storage.look_as(target.dtype), offset, size, steps)


def _look_into(target: LazyTensor, source: torch.Tensor, offset: int, size: Any, stride: Any) -> LazyTensor:
    target.data = record(aten.as_strided.default, (source, list(size), list(stride), offset), {})
    return target
