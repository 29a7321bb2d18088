"""Ops on non-strided tensors. Each is recorded as one `LAYOUT_CALL`, with the strided parts of the arguments as operands.

The number of elements of a sparse result depends on data, so each op needs a round trip to the executor.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from djinn_client.interception.handler_support import DEVICE_NAME, LazyTensor, ask_call, record
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.layout_operators import (
    COMPRESSED,
    COMPRESSED_RESULT,
    COO_RESULT,
    NESTED_RESULT,
    NESTED_VIEW_RESULT,
    NO_RESULT,
    PER_CHANNEL_RESULT,
    PER_TENSOR_RESULT,
    VALUES_PER_RESULT,
)
from djinn_core.ir.operators import LAYOUT_CALL
from djinn_core.torch_private import schema_of
from djinn_layouts.compressed_tensor import wrap_compressed
from djinn_layouts.nested_tensor import ComponentStrides, NestedTensor, wrap_nested
from djinn_layouts.parts_tensor import PartsTensor
from djinn_layouts.quantized_tensor import (
    DTYPES,
    PerChannel,
    PerTensor,
    QuantizedTensor,
    wrap_quantized,
)
from djinn_layouts.sparse_tensor import wrap_sparse

aten = torch.ops.aten

_EXECUTORS_DEFAULT = torch.float32
_RESIZES_OUT = torch.ops.aten.sparse_sampled_addmm.out  # other sparse ops do not resize `out`, on the CPU either


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on the executor, wait for layouts and sizes of its results, and return the results."""
    schema = schema_of(func)
    written_arguments = [
        a
        for i, a in enumerate(args)
        if schema.arguments[i].alias_info is not None and schema.arguments[i].alias_info.is_write
    ]
    keywords = {name: value for name, value in kwargs.items() if name not in {"non_blocking", "pin_memory"}}
    results = _ask_executor(func, args, keywords)
    default = torch.get_default_dtype()
    if default != _EXECUTORS_DEFAULT and _became_floats((*args, *keywords.values()), results):
        args = tuple([a.to(default) if isinstance(a, torch.Tensor) else a for a in args])
        results = _ask_executor(func, args, keywords)
    if written_arguments:
        _write(written_arguments[0], results[0])
        return written_arguments[0]
    if schema.returns and str(schema.returns[0].type) != "Tensor":
        return results[0].item()
    return results[0] if len(results) == 1 else tuple(results)


def _became_floats(arguments: Sequence[Any], results: Sequence[Any]) -> bool:
    """Return True if an op made floats from integers. They must have the process's default dtype, as on the CPU."""
    operands = [a for a in arguments if isinstance(a, torch.Tensor)]
    if any(a.dtype.is_floating_point or a.dtype.is_complex or a.is_quantized for a in operands):
        return False
    result_tensors = [r for r in results if isinstance(r, torch.Tensor)]
    dtype_is_explicit = any(a is _EXECUTORS_DEFAULT for a in arguments)
    return not dtype_is_explicit and any(r.dtype == _EXECUTORS_DEFAULT for r in result_tensors)


def call_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
    """Run an op with `out=`: run the functional op, then write its result into `out`.

    Raises:
        UnsupportedOperation: PyTorch has no such op without `out=`.
        RuntimeError: the result does not fit into `out`.
    """
    outs = [argument.name for argument in schema_of(func).arguments if argument.is_out]
    functional = _without_out(func)
    keywords = {name: value for name, value in kwargs.items() if name not in outs}
    results = run(functional, args, keywords)
    for name, result in zip(outs, results if isinstance(results, tuple) else (results,), strict=True):
        target = kwargs[name]
        if not torch.can_cast(result.dtype, target.dtype):
            raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {target.dtype}")
        if func is _RESIZES_OUT and result.layout == target.layout:
            target.data = result  # changes the size
        if result.shape != target.shape or result.layout != target.layout:
            raise RuntimeError(
                f"{func.name()}: out= is {target.layout} of {tuple(target.shape)}, but the result is {result.layout} of "
                f"{tuple(result.shape)}; {DEVICE_NAME} does not resize non-strided tensors"
            )
        _write(target, result.to(target.dtype))
    return kwargs[outs[0]] if len(outs) == 1 else tuple([kwargs[name] for name in outs])


@functools.cache
def _without_out(func: Any) -> Any:
    """Return the overload with the same arguments except `out=`."""
    signature = [(a.name, str(a.type)) for a in schema_of(func).arguments if not a.is_out]
    packet = func.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        if [(a.name, str(a.type)) for a in schema_of(candidate).arguments] == signature:
            return candidate
    raise UnsupportedOperation(
        f"{func.name()} cannot run on {DEVICE_NAME} with non-strided tensors, because PyTorch has no overload of it without `out`. Move the tensors to the CPU first"
    )


def _ask_executor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    operands: list[LazyTensor] = []
    positional = [_encode(a, func, operands) for a in args]
    keywords = {name: _encode(value, func, operands) for name, value in kwargs.items()}
    value_count = VALUES_PER_RESULT * max(1, len(schema_of(func).returns))
    headers, parts = ask_call(LAYOUT_CALL, func, positional, keywords, operands, value_count, VALUES_PER_RESULT)
    return [
        _build_result(header.tolist(), parts[VALUES_PER_RESULT * index + 1 : VALUES_PER_RESULT * (index + 1)])
        for index, header in enumerate(headers)
    ]


def _encode(argument: Any, func: Any, operands: list[LazyTensor]) -> Any:
    """Return an argument with strided parts instead of non-strided tensors. Append the strided tensors to `operands`."""
    if isinstance(argument, PartsTensor):
        return _encode(argument.to_argument(), func, operands)
    if isinstance(argument, LazyTensor):
        operands.append(argument)
    elif isinstance(argument, torch.Tensor) and (argument.dim() or argument.layout != torch.strided):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE_NAME}:0 and "
            f"{argument.device}! (when checking arguments of {func.name()})"
        )
    elif isinstance(argument, (list, tuple)):
        return [_encode(a, func, operands) for a in argument]
    return argument


def _build_result(header: Sequence[int], parts: Sequence[LazyTensor]) -> Any:
    """Return a result of the executor, built from its header and its strided parts."""
    kind, *header_numbers = header
    if kind == NO_RESULT:
        return None
    tensor: PartsTensor
    if kind == COO_RESULT:
        tensor = wrap_sparse(parts[0], parts[1], tuple(header_numbers[2:]), bool(header_numbers[1]))
    elif kind == COMPRESSED_RESULT:
        layout = getattr(torch, COMPRESSED[header_numbers[1]])
        tensor = wrap_compressed(layout, parts[0], parts[1], parts[2], tuple(header_numbers[2:]))
    elif kind == PER_TENSOR_RESULT:
        (scale,) = struct.unpack("<d", struct.pack("<q", header_numbers[3]))
        tensor = wrap_quantized(parts[0], DTYPES[header_numbers[1]], PerTensor(scale, header_numbers[2]))
    elif kind == PER_CHANNEL_RESULT:
        tensor = wrap_quantized(parts[0], DTYPES[header_numbers[1]], PerChannel(parts[1], parts[2], header_numbers[2]))
    elif kind == NESTED_RESULT:
        tensor = wrap_nested(parts[0], _split_rows(header_numbers[2:], header_numbers[1]))
    elif kind == NESTED_VIEW_RESULT:
        dims, count, numbers = header_numbers[1], header_numbers[2], header_numbers[3:]
        strides = ComponentStrides(
            _split_rows(numbers[dims * count : 2 * dims * count], dims), tuple(numbers[2 * dims * count :])
        )
        tensor = wrap_nested(parts[0], _split_rows(numbers[: dims * count], dims), strides)
    else:
        return parts[0]
    tensor.in_place = bool(header_numbers[0])
    return tensor


def _split_rows(numbers: Sequence[int], length: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(numbers[i : i + length]) for i in range(0, len(numbers), length or 1))


def _write(target: Any, result: Any) -> None:
    """Replace the contents of `target` by those of `result`, after an in-place op."""
    if isinstance(target, LazyTensor):
        record(aten.copy_.default, (target, result), {})
    elif isinstance(target, QuantizedTensor):
        record(aten.copy_.default, (target.held_integers, result.held_integers), {})
    elif isinstance(target, NestedTensor):
        aten.copy_.default(target, result)  # compares both memory layouts
    elif result.in_place:  # other tensors may be views of these values
        values = target.held_values
        record(aten.copy_.default, (values, result.held_values), {})
        target.take_parts_of(result)
        target.held_values = values
    else:
        target.take_parts_of(result)
