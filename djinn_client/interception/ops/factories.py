"""Factory ops. They have no tensor argument, so PyTorch calls the backend's kernels in place of `__torch_dispatch__`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from djinn_client.interception.device.current_device import current_device, existing_index
from djinn_client.interception.dispatch import handles, record
from djinn_client.interception.native.library import set_kernel
from djinn_client.interception.ops.constant_folding import record_factory
from djinn_client.interception.sync import copy
from djinn_client.interception.tensors.lazy_tensor import logical_device

aten = torch.ops.aten


def _make(
    func: Any, args: tuple[Any, ...], dtype: torch.dtype | None, device: torch.device | None, **extra: Any
) -> Any:
    index = existing_index(device) if device is not None else current_device()
    kwargs = {"dtype": dtype or torch.get_default_dtype(), "device": logical_device(index), **extra}
    return record_factory(func, args, kwargs)


def empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """`aten::empty.memory_format` on the remote device."""
    _check_layout(layout)
    extra = {} if memory_format is None else {"memory_format": memory_format}
    return _make(aten.empty.memory_format, (list(size),), dtype, device, **extra)  # type: ignore[no-any-return]


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """`aten::empty_strided` on the remote device."""
    _check_layout(layout)
    return _make(aten.empty_strided.default, (list(size), list(stride)), dtype, device)  # type: ignore[no-any-return]


def arange(start: Any, end: Any, step: Any = 1, **options: Any) -> torch.Tensor:
    """`aten::arange.start_step` on the remote device: its backend version resizes an `out=` tensor, so it needs one."""
    dtype = options.get("dtype")
    if dtype is None:
        whole = all(isinstance(n, int) for n in (start, end, step))
        dtype = torch.int64 if whole else torch.get_default_dtype()
    return _make(aten.arange.start_step, (start, end, step), dtype, options.get("device"))  # type: ignore[no-any-return]


def eye(rows: int, columns: int | None = None, **options: Any) -> torch.Tensor:
    """`aten::eye.m` on the remote device: its backend version resizes an `out=` tensor as well."""
    _check_layout(options.get("layout"))
    sizes = (rows, rows if columns is None else columns)
    return _make(aten.eye.m, sizes, options.get("dtype"), options.get("device"))  # type: ignore[no-any-return]


def _filled(func: Any) -> Callable[..., torch.Tensor]:
    """`aten::zeros`, `aten::ones` or `aten::scalar_tensor` as one instruction, in place of empty memory and a write."""

    def kernel(what: Any, **options: Any) -> torch.Tensor:
        _check_layout(options.get("layout"))
        given = list(what) if isinstance(what, (list, tuple)) else what
        return _make(func, (given,), options.get("dtype"), options.get("device"))  # type: ignore[no-any-return]

    return kernel


def _full(size: Sequence[int], value: Any, **options: Any) -> torch.Tensor:
    """`aten::full` as one instruction."""
    _check_layout(options.get("layout"))
    dtype = options.get("dtype")
    if dtype is None and isinstance(value, int):
        dtype = torch.bool if isinstance(value, bool) else torch.int64
    elif dtype is None and isinstance(value, complex):
        dtype = torch.get_default_dtype().to_complex()
    if isinstance(value, bool):  # as `canonicalize.fill`: a bool would be a constant of the form
        value = int(value)
    return _make(aten.full.default, (list(size), value), dtype, options.get("device"))  # type: ignore[no-any-return]


def zero_tensor(size: Sequence[int], *, device: torch.device | None = None, **options: Any) -> torch.Tensor:
    """`aten::_efficientzerotensor`: what autograd takes for tangents that are not given. Infinity times such a zero is zero."""
    index = current_device() if device is None else existing_index(device)
    return torch._efficientzerotensor(size, device=logical_device(index), **options)


@handles(aten.dot.default, aten.vdot.default)
def dot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As the kernels, which PyTorch lets see tensors that it knows to be zero."""
    product = record(func, args, kwargs)
    if any(isinstance(a, torch.Tensor) and a._is_zerotensor() for a in args):
        return zero_tensor((), dtype=product.dtype, device=product.device)
    return product


def _indices(func: Any) -> Callable[..., torch.Tensor]:
    """`aten::tril_indices` or `aten::triu_indices` on the remote device."""

    def kernel(row: int, col: int, offset: int = 0, **options: Any) -> torch.Tensor:
        dtype = options.get("dtype") or torch.int64
        return _make(func, (row, col, offset), dtype, options.get("device"))  # type: ignore[no-any-return]

    return kernel


def _check_layout(layout: torch.layout | None) -> None:
    if layout not in {None, torch.strided}:
        raise NotImplementedError(f"layout {layout} is not supported on remote_accelerator; use a strided tensor")


def kaiser_window(length: int, periodic: bool = True, beta: float = 12.0, **options: Any) -> torch.Tensor:
    """`aten::kaiser_window`, which has a kernel of its own for each backend."""
    device = options.get("device")
    return _make(aten.kaiser_window.beta, (length, periodic, beta), options.get("dtype"), device)  # type: ignore[no-any-return]


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`aten::_copy_from`: copies that PyTorch makes below the dispatch of subclasses, as `torch.tensor` does."""
    return copy(aten.copy_.default, (target, source), {})  # type: ignore[no-any-return]


_KERNELS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "arange": lambda end, **options: arange(0, end, 1, **options),
    "arange.start": lambda start, end, **options: arange(start, end, 1, **options),
    "arange.start_step": arange,
    "eye": eye,
    "eye.m": eye,
    "kaiser_window": kaiser_window,
    "kaiser_window.periodic": kaiser_window,
    "kaiser_window.beta": kaiser_window,
    "_copy_from": copy_from,
    "_efficientzerotensor": zero_tensor,
    "zeros": _filled(aten.zeros.default),
    "ones": _filled(aten.ones.default),
    "scalar_tensor": _filled(aten.scalar_tensor.default),
    "tril_indices": _indices(aten.tril_indices.default),
    "triu_indices": _indices(aten.triu_indices.default),
}


# Those whose small results the client knows; the others are recorded like any op.
def handle_factories() -> None:
    """Have these handle the ops that C++ calls Python with."""
    for name, kernel in _KERNELS.items():
        if name == "_efficientzerotensor":  # which C++ makes
            continue
        packet, _, overload = name.partition(".")
        handles(getattr(getattr(aten, packet), overload or "default"))(_handler(kernel))
    handles(aten.full.default)(_handler(_full))


def _handler(kernel: Callable[..., Any]) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    return lambda _func, args, kwargs: kernel(*args, **kwargs)


def handle_at(key: str) -> None:
    """Make these the kernels at a dispatch key of another device type, which is a name of the device."""
    for name, kernel in {**_KERNELS, "full": _full}.items():
        if name != "_copy_from":
            set_kernel(f"aten::{name}", kernel, key)
