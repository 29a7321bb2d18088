"""The device `cuda`, as remote tensors, generators, streams and events report it and accept it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from djinn_client.interception.device.current_device import current_device
from djinn_client.interception.native.generators import NativeGenerator as RemoteGenerator
from djinn_client.interception.native.streams import NamedEvent as RemoteEvent
from djinn_client.interception.native.streams import NamedStream as RemoteStream
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, is_remote, logical_device

_devices: dict[int, torch.device] = {}


def shown(index: int) -> torch.device:
    """`cuda:<index>`."""
    device = _devices.get(index)
    if device is None:
        device = _devices[index] = torch.device("cuda", index)
    return device


def meant(device: Any) -> Any:
    """The device that PyTorch's C++ knows the tensors by, where `device` names a remote one; else `device` itself.

    Tensors that are moved to where they are must stay themselves, which C++ sees by comparing devices.
    """
    if isinstance(device, int):
        return logical_device(device)
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device) and is_remote(device):
        index: int | None = device.index
        return logical_device(current_device() if index is None else index)
    return device


# PyTorch's own, which `rename` replaces on `torch.Tensor`.
_own_device: Any = torch._C.TensorBase.device.__get__
_own_to: Any = torch._C.TensorBase.to
_own_numpy: Any = torch._C.TensorBase.numpy
_own_device_of_storage: Any = torch._C.StorageBase.device.__get__  # type: ignore[attr-defined]


def _device(self: LazyTensor) -> torch.device:
    return shown(_own_device(self).index)


def _is_cuda(self: LazyTensor) -> bool:
    del self
    return True


def _to(self: LazyTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args and isinstance(args[0], (str, int, torch.device)):
        args = (meant(args[0]), *args[1:])
    elif "device" in kwargs:
        kwargs["device"] = meant(kwargs["device"])
    return _own_to(self, *args, **kwargs)  # type: ignore[no-any-return]


def _cuda(self: LazyTensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    return _own_to(self, meant("cuda" if device is None else device), non_blocking=non_blocking, **kwargs)  # type: ignore[no-any-return]


def _to_cuda(to_cuda: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Tensor.cuda` of every tensor: PyTorch takes a bare index for one of its accelerator, which has another name."""

    @functools.wraps(to_cuda)
    def cuda(self: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to_cuda(self, torch.device("cuda", device) if isinstance(device, int) else device, *args, **kwargs)

    return cuda


def _record_stream(self: LazyTensor, stream: Any) -> None:
    """Nothing: what a tensor's memory is for, the executor knows from the order of the program."""
    del self, stream


def _array_interface(self: LazyTensor) -> NoReturn:
    raise AttributeError(f"a tensor on {self.device} has no address on a GPU of this machine: use Tensor.cpu()")


def _numpy(self: LazyTensor, *, force: bool = False) -> Any:
    try:
        return _own_numpy(self, force=force)
    except TypeError as error:
        name = _own_device(self)
        raise TypeError(str(error).replace(str(name), str(shown(name.index)))) from None


def _renamed(device: property) -> property:
    """A device that remote tensors are not asked for: that of a generator, a stream or an event."""
    assert device.fget is not None
    known: Callable[[Any], torch.device] = device.fget
    return property(lambda self: shown(known(self).index))


_MEMBERS: dict[str, Any] = {
    "device": property(_device),
    "is_cuda": property(_is_cuda),
    "to": _to,
    "cuda": _cuda,
    "numpy": _numpy,
    "record_stream": _record_stream,
    "__cuda_array_interface__": property(_array_interface),
}


def _of_remote_tensors(name: str, member: Any) -> Any:
    """`member` for remote tensors, and PyTorch's own for others."""
    plain = getattr(torch.Tensor, name, None)
    if not isinstance(member, property):

        @functools.wraps(plain or member)
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return (member if is_remote(_own_device(self)) else plain)(self, *args, **kwargs)  # type: ignore[misc]

        return method

    def get(self: torch.Tensor) -> Any:
        if is_remote(_own_device(self)):
            return member.fget(self)  # type: ignore[misc]
        if plain is None:
            raise AttributeError(name)
        return plain.__get__(self)

    return property(get)


def _rename_storages() -> None:
    """Have remote storages say `cuda`, and be made by this name: builds of PyTorch without CUDA have no memory there."""
    storage: Any = torch.UntypedStorage
    own_to, own_new = storage.to, storage.__new__

    def device(self: torch.UntypedStorage) -> torch.device:
        found: torch.device = _own_device_of_storage(self)
        return shown(found.index) if is_remote(found) else found

    @functools.wraps(own_to)
    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        wanted = meant(device)
        if _own_device_of_storage(self) == wanted:
            return self
        return own_to(self, device=wanted, non_blocking=non_blocking)  # type: ignore[no-any-return]

    def new(cls: type[torch.UntypedStorage], *args: Any, **kwargs: Any) -> torch.UntypedStorage:
        if kwargs.get("device") is not None:
            kwargs["device"] = meant(kwargs["device"])
        return own_new(cls, *args, **kwargs)  # type: ignore[no-any-return]

    storage.device, storage.to, storage.__new__ = property(device), to, new


def rename() -> None:
    """Have remote tensors, storages, generators, streams and events say `cuda`."""
    _rename_storages()
    for name, member in _MEMBERS.items():
        setattr(torch.Tensor, name, _of_remote_tensors(name, member))
    torch.Tensor.cuda = _to_cuda(torch.Tensor.cuda)  # type: ignore[method-assign]
    for cls in (RemoteGenerator, RemoteStream, RemoteEvent):
        cls.device = _renamed(vars(cls)["device"])  # type: ignore[assignment]
