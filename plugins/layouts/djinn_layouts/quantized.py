"""Ops on quantized tensors: metadata queries, construction, and ops that only move elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from djinn_client.interception.handler_support import (
    DEVICE_NAME,
    Handler,
    LazyTensor,
    fetch,
    index_of,
    is_remote,
    logical_device,
    record,
    upload_copy,
)
from djinn_core.errors import UnsupportedOperation
from djinn_layouts import torch_layouts
from djinn_layouts.calls import call
from djinn_layouts.quantized_tensor import (
    ELEMENTS,
    PerChannel,
    PerTensor,
    QuantizedTensor,
    Quantizer,
    wrap_quantized,
)

aten = torch.ops.aten


def _per_tensor(source: QuantizedTensor) -> PerTensor:
    if not isinstance(source.quantizer, PerTensor):
        raise RuntimeError("Expected quantizer->qscheme() == kPerTensorAffine to be true, but got false")  # noqa: TRY004
    return source.quantizer


def _per_channel(source: QuantizedTensor) -> PerChannel:
    if not isinstance(source.quantizer, PerChannel):
        raise RuntimeError("Expected quantizer->qscheme() == kPerChannelAffine to be true, but got false")  # noqa: TRY004
    return source.quantizer


def _scale(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> float:
    return _per_tensor(args[0]).scale


def _zero_point(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return _per_tensor(args[0]).zero_point


def _scales(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return record(aten.detach.default, (_per_channel(args[0]).scales,), {})


def _zero_points(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return record(aten.detach.default, (_per_channel(args[0]).zero_points,), {})


def _axis(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return _per_channel(args[0]).axis


def _int_repr(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return record(aten.clone.default, (args[0].held_integers,), {})


def _share_parts(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    source = args[0]
    return wrap_quantized(source.held_integers, source.dtype, source.quantizer)


def _move_integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an op that only moves elements to the integers. The tensor must be quantized per tensor."""
    source = args[0]
    if func is not aten.clone.default:
        _per_tensor(source)
    results = record(func, (source.held_integers, *args[1:]), kwargs)
    if isinstance(results, (list, tuple)):
        return [wrap_quantized(integers, source.dtype, source.quantizer) for integers in results]
    return wrap_quantized(results, source.dtype, source.quantizer)


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, device, dtype = args[0], kwargs.get("device"), kwargs.get("dtype")
    if dtype not in {None, source.dtype}:
        raise UnsupportedOperation(
            f".to() cannot convert a tensor of {source.dtype} on {DEVICE_NAME} to {dtype}: use .dequantize()"
        )
    if device is not None and not is_remote(device):
        return _fetch_to_cpu(source).to(device)
    keywords = {name: kwargs[name] for name in ("device", "memory_format") if kwargs.get(name) is not None}
    return wrap_quantized(record(func, (source.held_integers,), keywords), source.dtype, source.quantizer)


def _fetch_to_cpu(source: QuantizedTensor) -> torch.Tensor:
    integers, quantizer = fetch(source.held_integers), source.quantizer
    if isinstance(quantizer, PerTensor):
        local = torch_layouts.quantized_per_tensor(integers, quantizer.scale, quantizer.zero_point, source.dtype)
    else:
        scales, zero_points = fetch(quantizer.scales), fetch(quantizer.zero_points)
        local = torch_layouts.quantized_per_channel(integers, scales, zero_points, quantizer.axis, source.dtype)
    return local


def upload_quantized(source: torch.Tensor, device: int) -> QuantizedTensor:
    """Return a copy of a quantized CPU tensor on remote device number `device`."""
    if source.dtype not in ELEMENTS:
        raise UnsupportedOperation(
            f"a tensor of {source.dtype} cannot be moved to {DEVICE_NAME}: .dequantize() it first"
        )
    quantizer: Quantizer
    if source.qscheme() == torch.per_tensor_affine:
        quantizer = PerTensor(source.q_scale(), source.q_zero_point())
    else:
        scales, zero_points = source.q_per_channel_scales(), source.q_per_channel_zero_points()
        parts = upload_copy(scales, device), upload_copy(zero_points, device)
        quantizer = PerChannel(*parts, source.q_per_channel_axis())
    return wrap_quantized(upload_copy(source.int_repr(), device), source.dtype, quantizer)


def _copy(func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not is_remote(target.device):
        return target.copy_(_fetch_to_cpu(source))
    index = (target.held_integers if isinstance(target, QuantizedTensor) else target).remote.meta.device
    if not is_remote(source.device):
        source = upload_quantized(source, index) if source.is_quantized else upload_copy(source, index)
    if not isinstance(target, QuantizedTensor):
        raise RuntimeError(  # noqa: TRY004 - as PyTorch
            "Copying from quantized Tensor to non-quantized Tensor is not allowed, please use dequantize to get a float Tensor "
            "from a quantized Tensor"
        )
    if isinstance(source, QuantizedTensor):
        record(aten.copy_.default, (target.held_integers, source.held_integers), {})
        target.quantizer = source.quantizer
        return target
    return call(func, (target, source), {})


def _set_storage(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `set_` with a storage. `torch.load` calls it after it made an empty tensor."""
    target, storage, offset, size, stride = args
    integers = record(aten.empty.memory_format, ([0],), {"dtype": ELEMENTS[target.dtype], "device": target.device})
    target.held_integers = func(integers, storage, offset, size, stride, **kwargs)
    return target


def _empty_like(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, device = args[0], kwargs.get("device")
    if device is not None and not is_remote(device):
        return torch.empty_like(_fetch_to_cpu(source), device=device)
    keywords = {"memory_format": kwargs["memory_format"]} if kwargs.get("memory_format") is not None else {}
    integers = record(aten.empty_like.default, (source.held_integers,), keywords)
    return wrap_quantized(integers, kwargs.get("dtype") or source.dtype, source.quantizer)


def _is_pinned(_func: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    return False


def _empty_per_tensor(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Handle `aten::_empty_affine_quantized` on the remote device."""
    quantizer = PerTensor(kwargs.get("scale", 1.0), kwargs.get("zero_point", 0))
    return wrap_quantized(_empty_integers(args[0], kwargs), kwargs["dtype"], quantizer)


def _empty_per_channel(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Handle `aten::_empty_per_channel_affine_quantized` on the remote device."""
    integers = _empty_integers(args[0], kwargs)
    scales, zero_points = (kwargs[name].to(integers.device) for name in ("scales", "zero_points"))
    return wrap_quantized(integers, kwargs["dtype"], PerChannel(scales, zero_points, kwargs["axis"]))


def _empty_integers(size: Sequence[int], options: Mapping[str, Any]) -> Any:
    device = logical_device(index_of(options.get("device")))
    return record(aten.empty.memory_format, (list(size),), {"dtype": ELEMENTS[options["dtype"]], "device": device})


_OF_INTEGERS: Final[Mapping[torch.dtype, torch.dtype]] = MappingProxyType({v: k for k, v in ELEMENTS.items()})


def _make_per_tensor(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Return a per-tensor quantized tensor. `args`: its integers, which are copied, its scale and its zero point."""
    integers, scale, zero_point = args
    integers_copy = record(aten.clone.default, (integers,), {})
    return wrap_quantized(integers_copy, _OF_INTEGERS[integers.dtype], PerTensor(scale, zero_point))


def _make_per_channel(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Return a per-channel quantized tensor. `args`: its integers, which are copied, scales, zero points and axis."""
    integers, scales, zero_points, axis = args
    if not all(isinstance(part, LazyTensor) for part in (integers, scales, zero_points)):
        raise RuntimeError("integers, scales and zero points must be on the same device")
    integers_copy = record(aten.clone.default, (integers,), {})
    return wrap_quantized(integers_copy, _OF_INTEGERS[integers.dtype], PerChannel(scales, zero_points, axis))


_MOVING = (
    aten.as_strided.default,
    aten._reshape_alias.default,
    aten._unsafe_view.default,
    aten.view.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.transpose.int,
    aten.t.default,
    aten.permute.default,
    aten.expand.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.unfold.default,
    aten.unbind.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.flip.default,
    aten.index_select.default,
    aten.index.Tensor,
    aten.clone.default,
)

# ops that run without the executor
LOCAL: Final[Mapping[Any, Handler]] = MappingProxyType(
    {
        aten.q_scale.default: _scale,
        aten.q_zero_point.default: _zero_point,
        aten.q_per_channel_scales.default: _scales,
        aten.q_per_channel_zero_points.default: _zero_points,
        aten.q_per_channel_axis.default: _axis,
        aten.set_.source_Storage_storage_offset: _set_storage,
        aten.int_repr.default: _int_repr,
        aten.detach.default: _share_parts,
        aten.alias.default: _share_parts,
        aten._to_copy.default: _to_copy,
        aten.copy_.default: _copy,
        aten.empty_like.default: _empty_like,
        aten.is_pinned.default: _is_pinned,
        **dict.fromkeys(_MOVING, _move_integers),
    }
)

# Constructors from other tensors.
MAKERS: Final[Mapping[Any, Handler]] = MappingProxyType(
    {
        aten._empty_affine_quantized.default: _empty_per_tensor,
        aten._empty_per_channel_affine_quantized.default: _empty_per_channel,
        aten._make_per_channel_quantized_tensor.default: _make_per_channel,
        aten._make_per_tensor_quantized_tensor.default: _make_per_tensor,
    }
)
