"""Makes remote tensors, generators, streams and events report the device `cuda`, and installs CUDA's tensor types.

`torch.empty(..., pin_memory=True)` and similar calls need a C++ allocator that Python cannot provide. So the tensor is
created in ordinary memory and then pinned, as `tensor.pin_memory()` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from djinn_client.interception.device.indexes import current_device
from djinn_client.interception.native.generators import Generator as RemoteGenerator
from djinn_client.interception.native.streams import NamedEvent as RemoteEvent
from djinn_client.interception.native.streams import NamedStream as RemoteStream
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, is_remote, logical_device
from djinn_client.torch_dispatch import pass_for

_devices: dict[int, torch.device] = {}


def shown(index: int) -> torch.device:
    """Return `cuda:<index>`."""
    device = _devices.get(index)
    if device is None:
        device = _devices[index] = torch.device("cuda", index)
    return device


def meant(device: Any) -> Any:
    """Return `device` with the name that PyTorch's C++ has for it if it is remote. Return other devices unchanged.

    A tensor that is moved to its own device must stay the same object, and C++ compares devices to decide this.
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
    """Return a replacement of `Tensor.cuda` that accepts the names of the remote device and a bare index."""

    @functools.wraps(to_cuda)
    def cuda(self: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to_cuda(self, torch.device("cuda", device) if isinstance(device, int) else device, *args, **kwargs)

    return cuda


def _record_stream(self: LazyTensor, stream: Any) -> None:
    """Do nothing, because the executor derives from program order how long memory is in use."""
    del self, stream


def _array_interface(self: LazyTensor) -> NoReturn:
    raise AttributeError(f"a tensor on {self.device} has no address on a GPU of this machine: use Tensor.cpu() first")


def _numpy(self: LazyTensor, *, force: bool = False) -> Any:
    try:
        return _own_numpy(self, force=force)
    except TypeError as error:
        name = _own_device(self)
        raise TypeError(str(error).replace(str(name), str(shown(name.index)))) from None


def _renamed(device: property) -> property:
    """Return a property that reports the device of a generator, a stream or an event as `cuda`."""
    assert device.fget is not None
    own_device: Callable[[Any], torch.device] = device.fget
    return property(lambda self: shown(own_device(self).index))


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
    """Return a function or property that calls `member` for remote tensors, and PyTorch's `Tensor.<name>` for other tensors."""
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
    """Make remote storages report `cuda`, and create storages on `cuda` as remote storages."""
    storage: Any = torch.UntypedStorage
    own_to, own_new = storage.to, storage.__new__

    def device(self: torch.UntypedStorage) -> torch.device:
        own_device: torch.device = _own_device_of_storage(self)
        return shown(own_device.index) if is_remote(own_device) else own_device

    @functools.wraps(own_to)
    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        target = meant(device)
        if _own_device_of_storage(self) == target:
            return self
        return own_to(self, device=target, non_blocking=non_blocking)  # type: ignore[no-any-return]

    def new(cls: type[torch.UntypedStorage], *args: Any, **kwargs: Any) -> torch.UntypedStorage:
        if kwargs.get("device") is not None:
            kwargs["device"] = meant(kwargs["device"])
        return own_new(cls, *args, **kwargs)  # type: ignore[no-any-return]

    storage.device, storage.to, storage.__new__ = property(device), to, new


# Legacy tensor types such as `torch.cuda.FloatTensor`.
_DTYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}


class CudaTensorType(type):
    """A tensor type of one dtype, such as `torch.cuda.FloatTensor`. A call of the type creates a remote tensor."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, LazyTensor) and instance.dtype is cls.dtype

    def __call__(cls, *args: Any, **_: Any) -> torch.Tensor:
        """Return an uninitialised tensor of the given sizes, or a tensor with the elements of a sequence or tensor."""
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            return torch.as_tensor(args[0], dtype=cls.dtype).to("cuda")
        sizes = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return torch.empty(sizes, dtype=cls.dtype, device="cuda")

    def __repr__(cls) -> str:
        return f"<class 'torch.cuda.{cls.__name__}'>"


_types: dict[str, CudaTensorType] = {
    f"torch.cuda.{name}": CudaTensorType(name, (), {"dtype": dtype, "__module__": "torch.cuda", "is_cuda": True})
    for name, dtype in _DTYPES.items()
}


def _tensor_type(kind: Any) -> CudaTensorType | None:
    return kind if isinstance(kind, CudaTensorType) else _types.get(kind) if isinstance(kind, str) else None


def _typed(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return _name_of(self) if isinstance(self, LazyTensor) else convert(self)
        kind = _tensor_type(dtype)
        if kind is not None:
            return self.to("cuda", kind.dtype, non_blocking=non_blocking)
        return convert(self, dtype, non_blocking, **kwargs)

    return type_


def _name_of(tensor: LazyTensor) -> str:
    names = (name for name, kind in _types.items() if kind.dtype is tensor.dtype)
    return next(names, f"torch.cuda.{str(tensor.dtype).removeprefix('torch.')}")


def _set_default(set_type: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_type)
    def set_default_tensor_type(kind: Any, /) -> None:
        tensor_type = _tensor_type(kind)
        if tensor_type is None:
            set_type(kind)
            torch.set_default_device(None)
        else:
            torch.set_default_dtype(tensor_type.dtype)
            torch.set_default_device("cuda")

    return set_default_tensor_type


_FACTORIES = (
    "arange empty empty_like empty_strided eye full full_like linspace ones ones_like rand rand_like randint randn randn_like randperm "
    "tensor zeros zeros_like"
).split()


def _pinning(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, pin_memory: bool | None = None, **kwargs: Any) -> torch.Tensor:
        tensor = factory(*args, **kwargs)
        return tensor.pin_memory() if pin_memory else tensor

    return make


def replace() -> None:
    """Make remote tensors, storages, generators, streams and events report `cuda`, and install tensor types and factories."""
    _rename_storages()
    for name, member in _MEMBERS.items():
        setattr(torch.Tensor, name, _of_remote_tensors(name, member))
    torch.Tensor.cuda = _to_cuda(torch.Tensor.cuda)  # type: ignore[method-assign]
    for cls in (RemoteGenerator, RemoteStream, RemoteEvent):
        cls.device = _renamed(vars(cls)["device"])  # type: ignore[assignment]
    for name, kind in _types.items():
        setattr(torch.cuda, name.rpartition(".")[2], kind)
    torch.Tensor.type = _typed(torch.Tensor.type)  # type: ignore[method-assign]
    torch.set_default_tensor_type = _set_default(torch.set_default_tensor_type)
    for name in _FACTORIES:
        original = getattr(torch, name)
        pinning = _pinning(original)
        pass_for(pinning, original)
        setattr(torch, name, pinning)
