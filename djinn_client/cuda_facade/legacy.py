"""Types of tensors as they were named before there were devices: `torch.cuda.FloatTensor` and its like."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from djinn_client.interception.tensors.lazy_tensor import LazyTensor

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
    """A type of remote tensors of one dtype, which is called to make one."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, LazyTensor) and instance.dtype is cls.dtype

    def __call__(cls, *args: Any, **_: Any) -> torch.Tensor:
        """A tensor of the sizes in `args`, not initialised, or of the elements of the sequence or tensor in it."""
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


def replace() -> None:
    """Make the types those of remote tensors, wherever PyTorch takes or names one."""
    for name, kind in _types.items():
        setattr(torch.cuda, name.rpartition(".")[2], kind)
    torch.Tensor.type = _typed(torch.Tensor.type)  # type: ignore[method-assign]
    torch.set_default_tensor_type = _set_default(torch.set_default_tensor_type)


def _named(kind: Any) -> CudaTensorType | None:
    return kind if isinstance(kind, CudaTensorType) else _types.get(kind) if isinstance(kind, str) else None


def _typed(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return _name_of(self) if isinstance(self, LazyTensor) else convert(self)
        kind = _named(dtype)
        if kind is not None:
            return self.to("cuda", kind.dtype, non_blocking=non_blocking)
        return convert(self, dtype, non_blocking, **kwargs)

    return type_


def _name_of(tensor: LazyTensor) -> str:
    found = (name for name, kind in _types.items() if kind.dtype is tensor.dtype)
    return next(found, f"torch.cuda.{str(tensor.dtype).removeprefix('torch.')}")


def _set_default(set_type: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_type)
    def set_default_tensor_type(kind: Any, /) -> None:
        named = _named(kind)
        if named is None:
            set_type(kind)
            torch.set_default_device(None)
        else:
            torch.set_default_dtype(named.dtype)
            torch.set_default_device("cuda")

    return set_default_tensor_type
