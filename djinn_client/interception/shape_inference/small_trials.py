"""Trials of the CPU's kernels on small tensors: what they say of dtypes and numbers holds for all sizes, and for meta tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from djinn_client.interception.shape_inference.shape_formulas import broadcast, is_pointwise
from djinn_client.interception.shape_inference.write_checks import returning
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_core import torch_private
from djinn_core.ir.values import TensorMeta, contiguous_strides, tensor_meta

aten = torch.ops.aten
_SIZES: Final = frozenset({"size", "pad"})
_PADDINGS: Final = frozenset({"padding", "output_padding"})
_COUNTS: Final = {"steps": 2, "bins": 2, "n": 2, "m": 2, "window_length": 2, "k": 1, "num_samples": 1}
_CHOICES: Final = frozenset(
    {torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Generator, list, tuple}
)
_RANGE: Final = {"start": 0, "end": 1, "step": 1}
# These write a number to a single element without a check.
_FILLING: Final = frozenset({aten.fill_.Scalar, aten.full.default, aten.full_like.default, aten.new_full.default})


def try_small(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of the CPU's kernel for these arguments, whose tensors are made to have one element. No random number is drawn.

    The element is a 1 where elements do not index others: division by 0 is refused.

    Raises:
        Exception: as eager PyTorch, and where small tensors do not fit each other.
    """
    names = [a.name for a in torch_private.schema_of(func).arguments]
    length, filled = 2 if func in _FILLING else 1, int(torch.Tag.pointwise in func.tags)
    small = [_small(name, argument, length, filled) for name, argument in zip(names, args, strict=False)]
    if func is aten.arange.start_step:
        small = [_RANGE[name] for name in names[: len(args)]]
    named = {name: _small(name, value, length, filled) for name, value in kwargs.items()}
    state = torch.default_generator.get_state() if torch.Tag.nondeterministic_seeded in func.tags else None
    try:
        return func(*small, **named)
    finally:
        if state is not None:
            torch.default_generator.set_state(state)


def try_overlapping(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Have the CPU's kernel look at small tensors that overlap themselves where those of the call do. No random number is drawn.

    Raises:
        RuntimeError: as eager PyTorch, if the kernel refuses to write to elements that share memory.
    """
    filled, small = int(torch.Tag.pointwise in func.tags), dict[int, torch.Tensor]()

    def overlapping(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [overlapping(one) for one in argument]
        if not isinstance(argument, LazyTensor):
            return torch.device("cpu") if isinstance(argument, torch.device) else argument
        meta = argument.remote.meta
        own = [min(n, 2) if step else min(n, 1) for n, step in zip(meta.shape, meta.stride, strict=True)]
        made = torch.full(own, filled, dtype=meta.dtype).expand([min(n, 2) for n in meta.shape])
        return small.setdefault(id(argument), made)

    state = torch.default_generator.get_state()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # who records the op warns
            named = {name: overlapping(value) for name, value in kwargs.items() if name != "generator"}
            func(*map(overlapping, args), **named)
    except Exception as error:
        if "more than one element of the written-to tensor" in str(error):
            raise RuntimeError(str(error)) from None
        # what small tensors are refused for beside that says nothing of large ones
    finally:
        torch.default_generator.set_state(state)


class PointwiseResult(msgspec.Struct, frozen=True):
    """The metadata of a pointwise op's result, and the operand that is written, to which it gives this metadata; None if it is new."""

    meta: TensorMeta
    target: LazyTensor | None


def pointwise_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: int) -> PointwiseResult | None:
    """The result of a pointwise op, by a trial; None where a meta kernel must tell.

    PyTorch's meta kernels of these ops are written in Python and take fifty times as long as the CPU's kernel for one element. That
    tells the dtype; the shape follows from those of the operands, and row-major operands give a row-major result.
    """
    out = kwargs.get("out")
    plain = func if out is None else returning(func)
    if plain is None or not is_pointwise(plain) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    others = kwargs if out is None else {name: value for name, value in kwargs.items() if name != "out"}
    given = (*args, *others.values())
    tensors = [a for a in given if isinstance(a, LazyTensor)]
    if not tensors or not all(_is_plain(t.remote.meta) for t in tensors) or any(map(_is_not_taken, given)):
        return None
    shape = _shape_together(plain, [t.remote.meta.shape for t in tensors])
    if shape is None:
        return None
    try:
        made = try_small(plain, args, others)
    except Exception:
        return None  # the other way finds the error that PyTorch raises
    meta = tensor_meta(shape, contiguous_strides(shape), 0, made.dtype, device)
    target = args[0] if torch_private.schema_of(plain).returns[0].alias_info is not None else out
    return PointwiseResult(meta, None) if target is None else _written(meta, target, tensors)


def _written(meta: TensorMeta, target: Any, operands: Sequence[LazyTensor]) -> PointwiseResult | None:
    """The result as it is written to a tensor that has the same dtype and shape, or no elements yet."""
    before = target.remote.meta if isinstance(target, LazyTensor) else None
    if before is None or before.dtype is not meta.dtype or before.conj or before.neg:
        return None
    if before.shape == meta.shape and _is_plain(before):
        return PointwiseResult(before, target)
    if before.numel or any(o.remote.storage == target.remote.storage for o in operands):
        return None
    return PointwiseResult(tensor_meta(meta.shape, meta.stride, before.offset, meta.dtype, before.device), target)


def _is_plain(meta: TensorMeta) -> bool:
    """True if a tensor lies in memory row by row, and has elements."""
    return 0 not in meta.shape and meta.stride == contiguous_strides(meta.shape) and not (meta.conj or meta.neg)


def _is_not_taken(argument: Any) -> bool:
    """True for arguments that may decide of more than the dtype, and for CPU tensors but numbers in their shape."""
    if isinstance(argument, torch.Tensor):
        return not isinstance(argument, LazyTensor) and argument.dim() > 0
    return type(argument) in _CHOICES


def _shape_together(func: Any, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape that operands broadcast to; None where they do not, or where the op does not broadcast."""
    if "_backward" in func.name() and any(shape != shapes[0] for shape in shapes):
        return None
    return broadcast(shapes)


def _small(name: str, argument: Any, length: int, filled: int) -> Any:
    if isinstance(argument, torch.Tensor) and argument.dim() == 0 and argument.device.type == "cpu":
        return argument  # a number, which decides dtypes in another way than a tensor
    if isinstance(argument, torch.Tensor):
        shape = (0,) if name == "out" else (length,) * argument.dim()
        return torch.full(shape, 1 if name == "lengths" else filled, dtype=argument.dtype)
    if isinstance(argument, torch.device):
        return torch.device("cpu")
    if name in _COUNTS and type(argument) is int:
        return min(argument, _COUNTS[name])
    if name in _SIZES and isinstance(argument, (list, tuple)):
        return [length] * len(argument)
    if name in _PADDINGS and isinstance(argument, (list, tuple)):
        return [min(n, 1) for n in argument]
    if isinstance(argument, (list, tuple)):
        return [_small(name, one, length, filled) for one in argument]
    return argument
