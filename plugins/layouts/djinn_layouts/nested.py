"""Ops on strided nested tensors that run on the client: metadata queries, access to components, construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NoReturn

import torch

from djinn_client.interception.handler_support import (
    DEVICE_NAME,
    Handler,
    LazyTensor,
    existing_index,
    fetch,
    is_remote,
    logical_device,
    record,
    upload_copy,
)
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.layout_operators import NESTED_VIEW, OPERATORS_OF
from djinn_core.ir.values import contiguous_strides
from djinn_layouts import torch_layouts
from djinn_layouts.calls import call
from djinn_layouts.nested_tensor import (
    ComponentStrides,
    NestedTensor,
    Sizes,
    contiguous_offsets,
    element_counts,
    symbolic_size,
    wrap_nested,
)

aten = torch.ops.aten


def _query_handler(make: Callable[[NestedTensor], Any]) -> Handler:
    return lambda _func, args, _kwargs: make(args[0])


def _stride(source: NestedTensor) -> list[int]:
    strides = [1]
    for dim in range(source.dim() - 1, 0, -1):
        strides.insert(0, strides[0] * max(size[dim - 1] for size in source.sizes))
    return strides


def _table(numbers: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _size_table(source: NestedTensor) -> torch.Tensor:
    return _table(source.sizes)


def _is_contiguous(source: NestedTensor) -> bool:
    return source.component_strides is None


def _values(source: NestedTensor) -> Any:
    """Handle `values()`: return the elements in order of memory, including gaps of a non-contiguous tensor."""
    return record(aten.detach.default, (source.held_values,), {})


def _tensors(source: NestedTensor) -> list[Any]:
    """Return the components of a nested tensor as views of its memory."""
    if source.component_strides is None:
        pieces = record(aten.split_with_sizes.default, (source.held_values, element_counts(source.sizes)), {})
        return [
            record(aten.view.default, (piece, list(size)), {}) for piece, size in zip(pieces, source.sizes, strict=True)
        ]
    start = source.held_values.remote.meta.offset
    return [
        record(aten.as_strided.default, (source.held_values, list(size), list(stride), start + offset), {})
        for size, stride, offset in zip(
            source.sizes, source.component_strides.strides, source.component_strides.offsets, strict=True
        )
    ]


def _contiguous(source: NestedTensor) -> NestedTensor:
    """Return the tensor if it is contiguous, else a contiguous copy."""
    if source.component_strides is None:
        return source
    rows = [component.reshape(-1) for component in _tensors(source)]
    return wrap_nested(record(aten.cat.default, (rows,), {}), source.sizes)


def _view(source: NestedTensor, sizes: Sizes, layout: ComponentStrides) -> NestedTensor:
    """Return a view of the memory of `source`. If the components are adjacent, the view is contiguous."""
    start, count = layout.offsets[0] if layout.offsets else 0, sum(element_counts(sizes))
    is_dense = layout.strides == tuple(contiguous_strides(size) for size in sizes)
    if not is_dense or layout.offsets != tuple(start + n for n in contiguous_offsets(sizes)):
        return wrap_nested(source.held_values, sizes, layout)
    if start or count != source.held_values.shape[0]:
        return wrap_nested(record(aten.slice.Tensor, (source.held_values, 0, start, start + count), {}), sizes)
    return wrap_nested(source.held_values, sizes)


def _view_by_executor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a view op whose strides and offsets only the executor can compute."""
    source = args[0]
    result = call(func, args, kwargs)
    if result.component_strides is None:
        return result  # it has no elements
    return _view(source, result.sizes, result.component_strides)


def _transpose(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    source, dims = args[0], args[0].dim()
    for dim in args[1:]:
        if not -dims <= dim < dims:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-dims}, {dims - 1}], but got {dim})"
            )
    first, second = (dim % dims for dim in args[1:])
    if first == second:
        return _share_parts(_func, args, {})
    if not first or not second:
        raise RuntimeError("Nested tensor dimension 0 cannot be transposed")
    layout = source.strides_and_offsets()
    sizes, strides = (
        tuple(_swap_entries(numbers, first - 1, second - 1) for numbers in table)
        for table in (source.sizes, layout.strides)
    )
    return _view(source, sizes, ComponentStrides(strides, layout.offsets))


def _swap_entries(numbers: Sequence[int], first: int, second: int) -> tuple[int, ...]:
    swapped = list(numbers)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    return tuple(swapped)


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, dim, index = args
    if dim not in {0, -source.dim()}:
        return _view_by_executor(func, args, kwargs)
    count = len(source.sizes)
    if not -count <= index < count:
        raise IndexError(
            f"index {index} is out of bounds for dimension 0 with size {count}"
            if count
            else "You can only select when the NT is not empty."
        )
    return _tensors(source)[index]


def _slice(_func: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> NoReturn:
    raise UnsupportedOperation("nested tensors have no slices, as on the CPU: use .unbind() or .narrow(0, ...)")


def _unbind(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    source, dim = args[0], args[1] if len(args) > 1 else 0
    if dim not in {0, -source.dim()}:
        raise RuntimeError(f"NestedTensor can only be unbound along dimension 0 got dimension {dim} instead.")
    return _tensors(source)


def _chunk(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    source, chunks, dim = args[0], args[1], args[2] if len(args) > 2 else 0
    width = _width_to_divide("Chunk", "chunk", source, dim)
    if width is None or width % chunks:
        raise RuntimeError(
            "Chunk for nested tensors is only supported for nested tensors with trailing dimension divisible by chunks, got: "
            f"{width} % {chunks}"
        )
    return _split(source, [width // chunks] * chunks)


def _split_with_sizes(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    source, widths, dim = args[0], args[1], args[2] if len(args) > 2 else 0
    width = _width_to_divide("split_with_sizes", "split_with_sizes", source, dim)
    if width != sum(widths):
        raise RuntimeError(
            f"split_with_sizes expects split_sizes to sum exactly to {width} (input tensor's size at dimension -1), but got "
            f"split_sizes={list(widths)}"
        )
    return _split(source, widths)


def _width_to_divide(name: str, op: str, source: NestedTensor, dim: int) -> int | None:
    """Return the size of the last dimension, or None if it differs between components.

    Raise RuntimeError if `dim` is another dimension. `name`, `op`: names of the op in PyTorch's error messages.
    """
    last = source.dim() - 1
    if dim not in {-1, last}:
        raise RuntimeError(
            f"{name} for nested tensors is currently only supported for the last dimension. Got dimension {dim}"
        )
    if source.component_strides is not None:
        raise RuntimeError(f"{op} expects `self` to be contiguous.")
    return source.common_size(last)


def _split(source: NestedTensor, widths: Sequence[int]) -> list[NestedTensor]:
    """Return views that split a tensor along its last dimension. `widths`: their sizes in this dimension."""
    layout, parts, start = source.strides_and_offsets(), [], 0
    for width in widths:
        sizes = tuple((*size[:-1], width) for size in source.sizes)
        parts.append(_view(source, sizes, ComponentStrides(layout.strides, tuple(n + start for n in layout.offsets))))
        start += width
    return parts


def _share_parts(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return wrap_nested(args[0].held_values, args[0].sizes, args[0].component_strides)


def _clone(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, layout = args[0], kwargs.get("memory_format") or torch.preserve_format
    if layout not in {torch.preserve_format, torch.contiguous_format}:
        raise RuntimeError(
            f"Nested tensor clone supports Preserve and Contiguous memory formats, called clone with memory format: {layout}"
        )
    if source.component_strides is not None and layout is torch.contiguous_format:
        return _contiguous(source)
    return wrap_nested(record(aten.clone.default, (source.held_values,), {}), source.sizes, source.component_strides)


def _map_elements(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an elementwise op to the memory of all components, or on the executor to tensors whose layouts differ."""
    first = args[0]
    if not isinstance(first, NestedTensor):
        return call(func, args, kwargs)
    if first.component_strides is not None and not _applies_to_whole_memory(func, args):
        if func.name() in OPERATORS_OF[NESTED_VIEW]:
            return call(func, args, kwargs)
        raise RuntimeError(_NOT_CONTIGUOUS)
    for operand in args[1:]:
        if isinstance(operand, NestedTensor):
            if operand.sizes != first.sizes or operand.component_strides != first.component_strides:
                return call(func, args, kwargs)
        elif isinstance(operand, torch.Tensor) and operand.dim():
            return call(func, args, kwargs)
    operands = [a.held_values if isinstance(a, NestedTensor) else a for a in args]
    results = record(func, tuple(operands), kwargs)
    if results is first.held_values:
        return first
    if isinstance(results, (list, tuple)):
        return tuple([wrap_nested(result, first.sizes, first.component_strides) for result in results])
    return wrap_nested(results, first.sizes, first.component_strides)


def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, device = args[0], kwargs.get("device")
    keywords = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
    if device is not None and not is_remote(device):
        return func(_fetch_to_cpu(source), **keywords)
    return wrap_nested(record(func, (source.held_values, *args[1:]), keywords), source.sizes, source.component_strides)


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, device, dtype = args[0], kwargs.get("device"), kwargs.get("dtype")
    if kwargs.get("layout") not in {None, torch.strided}:
        raise UnsupportedOperation(
            f".to() cannot convert a nested tensor on {DEVICE_NAME} to layout {kwargs['layout']}"
        )
    if device is not None and not is_remote(device):
        return _fetch_to_cpu(source).to(device=device, dtype=dtype)
    keywords = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
    return wrap_nested(record(func, (source.held_values,), keywords), source.sizes, source.component_strides)


def _fetch_to_cpu(source: NestedTensor) -> torch.Tensor:
    layout = source.strides_and_offsets()
    tables = _size_table(source), _table(layout.strides), _table(layout.offsets)
    return torch_layouts.nested_of_memory(fetch(source.held_values), *tables)


def upload_nested(source: torch.Tensor, device: int) -> NestedTensor:
    """Return a copy of a nested CPU tensor on remote device number `device`."""
    elements, sizes = torch_layouts.elements_of_nested(source)
    return wrap_nested(upload_copy(elements, device), tuple(tuple(size) for size in sizes.tolist()))


def _copy(func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not is_remote(target.device):
        return target.copy_(_fetch_to_cpu(source))
    if not is_remote(source.device) and source.is_nested:
        source = upload_nested(source, target.held_values.remote.meta.device)
    if not isinstance(source, NestedTensor) or source.sizes != target.sizes:
        raise RuntimeError("copy_ only supports tensors that are the same size for Nested implementations")
    if target.component_strides is None and source.component_strides is None:
        record(func, (target.held_values, source.held_values), {})
        return target
    for target_component, source_component in zip(_tensors(target), _tensors(source), strict=True):
        record(func, (target_component, source_component), {})
    return target


def _is_same_size(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    return all(isinstance(a, NestedTensor) for a in args) and args[0].sizes == args[1].sizes


def _from_list(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `torch.nested.nested_tensor` and `as_nested_tensor` of remote tensors."""
    arguments = dict(zip(("list", "dtype", "layout", "device"), args, strict=False)) | kwargs
    return _nested_of_list(arguments["list"], arguments.get("dtype"), arguments.get("device"))


def _nested_of_list(tensors: Sequence[Any], dtype: torch.dtype | None, device: torch.device | None) -> Any:
    if device is not None and not is_remote(device):
        return torch.nested.as_nested_tensor([tensor.to(device) for tensor in tensors], dtype=dtype)
    if len({tensor.dim() for tensor in tensors}) > 1:
        raise RuntimeError("All Tensors given to nested_tensor must have the same dimension.")
    target_device = device or next(tensor.device for tensor in tensors if isinstance(tensor, LazyTensor))
    options = {"device": logical_device(existing_index(target_device)), "dtype": dtype or tensors[0].dtype}
    elements: Any = torch.cat([tensor.to(**options).reshape(-1) for tensor in tensors])
    return wrap_nested(elements, tuple(tuple(int(n) for n in tensor.shape) for tensor in tensors))


def _from_padded(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Return the gradient of `to_padded_tensor`: the elements without padding."""
    padded, sizes = args[0], args[1].tolist()
    if len(args) > 2 and args[2]:
        raise UnsupportedOperation(f"aten::_nested_from_padded cannot transpose on {DEVICE_NAME}. Run it on the CPU")
    pieces = [padded[(i, *(slice(n) for n in size))].reshape(-1) for i, size in enumerate(sizes)]
    return wrap_nested(torch.cat(pieces), tuple(tuple(size) for size in sizes))  # type: ignore[arg-type]


def _from_mask(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Fetch the mask, and return a nested tensor with the vectors that the mask selects in each batch element."""
    padded, mask, must_be_aligned = args[0], args[1], args[2] if len(args) > 2 else True
    if mask.dtype != torch.bool or mask.dim() != 2 or padded.dim() != 3 or mask.shape != padded.shape[:2]:
        raise RuntimeError(
            f"Expected an input of three dimensions, and a mask of ScalarType Bool with its first two sizes, but got an input of "
            f"shape {tuple(padded.shape)}, and a {mask.dtype} mask of shape {tuple(mask.shape)}"
        )
    local_mask = mask.cpu()
    counts = local_mask.sum(1)
    if must_be_aligned and bool((local_mask != (torch.arange(mask.shape[1], device="cpu") < counts[:, None])).any()):
        raise RuntimeError("Mask must be left-aligned without gaps")
    return _from_padded(None, (padded, torch.stack([counts, torch.full_like(counts, padded.shape[2])], 1)), {})


def _view_from_buffer(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    values, size_table, strides, offsets = (a.cpu().tolist() if i else a for i, a in enumerate(args))
    sizes, strides = (tuple(tuple(row) for row in table) for table in (size_table, strides))
    return _view(wrap_nested(values, ()), sizes, ComponentStrides(strides, tuple(offsets)))


def _reshape(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Handle `reshape` on the client, because PyTorch's kernel reads the C++ object of a CPU nested tensor."""
    source, shape = args
    if not shape:
        raise RuntimeError("shape '[]' is invalid for a nested tensor")
    if shape[0] != len(source.sizes):
        raise RuntimeError("reshape: For now nested reshape cannot change or infer the implicit batch dimension")
    if source.component_strides is None:
        return source.view(shape)
    try:
        return source.view(shape)
    except RuntimeError:
        return source.contiguous().view(shape)


def _reshape_as(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    source, values = args
    common_size = [values.common_size(dim) for dim in range(values.dim())]
    return source.reshape([-1 if n is None else n for n in common_size])


class _SplitFunction(torch.autograd.Function):
    """Autograd function of `unbind`, `chunk` and `split_with_sizes`, because PyTorch's formulas need a CPU tensor."""

    @staticmethod
    def forward(ctx: Any, source: NestedTensor, handler: Handler, *args: Any) -> Any:
        results = handler(None, (source.detach(), *args), {})
        ctx.sizes, ctx.argument_count, ctx.handler = source.sizes, 1 + len(args), handler
        ctx.result_sizes = [result.sizes if isinstance(result, NestedTensor) else () for result in results]
        ctx.options = {"dtype": source.dtype, "device": source.device}
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.handler is _chunk:
            raise RuntimeError("Nested Strided Tensor doesn't support chunk backward.")
        if any(isinstance(g, NestedTensor) for g in gradients):
            columns = [
                [torch.zeros(size, **ctx.options) for size in sizes] if g is None else g.unbind()
                for g, sizes in zip(gradients, ctx.result_sizes, strict=True)
            ]
            rows = [torch.cat(row, -1) for row in zip(*columns, strict=True)]
        elif ctx.result_sizes[0]:
            rows = [torch.zeros(size, **ctx.options) for size in ctx.sizes]
        else:
            rows = [
                torch.zeros(size, **ctx.options) if g is None else g
                for g, size in zip(gradients, ctx.sizes, strict=True)
            ]
        return aten._nested_tensor_from_tensor_list.default(rows), *[None] * ctx.argument_count


def _with_autograd(handler: Handler) -> Handler:
    """Return a handler that has the backward of `_SplitFunction`, because PyTorch's own formulas need a CPU tensor."""

    def split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, *arguments = args
        if torch.is_grad_enabled() and source.requires_grad:
            return list(_SplitFunction.apply(source, handler, *(arguments or (0,))))  # type: ignore[no-untyped-call]
        return handler(func, args, kwargs)

    return split


# Ops that make nested tensors from strided tensors, and ops that need an autograd formula.
MAKERS: Final[Mapping[Any, Handler]] = MappingProxyType(
    {
        aten._nested_from_padded.default: _from_padded,
        aten._nested_tensor_from_mask.default: _from_mask,
        aten._nested_tensor_from_tensor_list.default: _from_list,
        aten._nested_view_from_buffer.default: _view_from_buffer,
        aten.chunk.default: _with_autograd(_chunk),
        aten.reshape.default: _reshape,
        aten.reshape_as.default: _reshape_as,
        aten.split_with_sizes.default: _with_autograd(_split_with_sizes),
        aten.unbind.int: _with_autograd(_unbind),
    }
)

_ELEMENTWISE = (
    "abs abs_ cos gelu gelu_ gelu_backward isinf isnan isneginf isposinf logical_not logical_not_ native_dropout_backward neg "
    "neg_ relu relu_ sgn sgn_ silu silu_ silu_backward sin sqrt tanh tanh_ tanh_backward threshold_backward zero_ cos_ sin_ exp "
    "exp_ log sigmoid sigmoid_backward normal_ native_dropout"
).split()
_BINARY = ("add", "sub", "mul", "div")


_NOT_CONTIGUOUS: Final = "NestedTensor must be contiguous to get buffer."
# PyTorch applies these ops to the whole underlying memory. The result has the layout of the operand.
_ON_MEMORY: Final = frozenset({
    aten.eq.Scalar,
    aten.ge.Scalar,
    aten.gt.Scalar,
    aten.masked_fill.Scalar,
    aten.native_dropout.default,
    aten.native_dropout_backward.default,
})  # fmt: skip


_SCALING: Final = frozenset(getattr(getattr(aten, name), kind) for name in _BINARY for kind in ("Tensor", "Scalar"))


def _applies_to_whole_memory(func: Any, args: tuple[Any, ...]) -> bool:
    return func in _ON_MEMORY or (func in _SCALING and not isinstance(args[1], NestedTensor))


def _elementwise() -> dict[Any, Handler]:
    handlers: dict[Any, Handler] = {}
    for name in _ELEMENTWISE:
        handlers[getattr(aten, name).default] = _map_elements
    for name in _BINARY:
        for suffix in ("", "_"):
            for overload in ("Tensor", "Scalar"):
                handlers[getattr(getattr(aten, name + suffix), overload)] = _map_elements
    for op in (aten.fill_.Scalar, aten.eq.Scalar, aten.ge.Scalar, aten.gt.Scalar, aten.masked_fill.Scalar):
        handlers[op] = _map_elements
    return handlers


# Ops that run on the client, and elementwise ops on the memory of all components.
LOCAL: Final[Mapping[Any, Handler]] = MappingProxyType(
    {
        torch.ops.prim.layout.default: _query_handler(lambda _source: torch.strided),
        aten.dim.default: _query_handler(lambda source: 1 + (len(source.sizes[0]) if source.sizes else 0)),
        aten.sym_size.default: _query_handler(symbolic_size),
        aten.size.default: _query_handler(symbolic_size),
        aten.sym_stride.default: _query_handler(_stride),
        aten.sym_numel.default: _query_handler(lambda source: sum(element_counts(source.sizes))),
        aten.numel.default: _query_handler(lambda source: sum(element_counts(source.sizes))),
        aten.sym_storage_offset.default: _query_handler(lambda _source: 0),
        aten.is_contiguous.default: _query_handler(_is_contiguous),
        aten.is_contiguous.memory_format: _query_handler(_is_contiguous),
        aten.is_non_overlapping_and_dense.default: _query_handler(lambda _source: False),
        aten._nested_tensor_size.default: _query_handler(_size_table),
        aten._nested_tensor_strides.default: _query_handler(
            lambda source: _table(source.strides_and_offsets().strides)
        ),
        aten._nested_tensor_storage_offsets.default: _query_handler(
            lambda source: _table(source.strides_and_offsets().offsets)
        ),
        aten.values.default: _query_handler(_values),
        aten.unbind.int: _unbind,
        aten.chunk.default: _chunk,
        aten.split_with_sizes.default: _split_with_sizes,
        aten.select.int: _select,
        aten.slice.Tensor: _slice,
        aten.transpose.int: _transpose,
        aten.narrow.default: _view_by_executor,
        aten.squeeze.default: _view_by_executor,
        aten.squeeze.dim: _view_by_executor,
        aten.squeeze.dims: _view_by_executor,
        aten.unsqueeze.default: _view_by_executor,
        aten.view.default: _view_by_executor,
        aten.detach.default: _share_parts,
        aten.alias.default: _share_parts,
        aten.clone.default: _clone,
        aten._to_copy.default: _to_copy,
        aten.copy_.default: _copy,
        aten.is_same_size.default: _is_same_size,
        aten.is_pinned.default: _query_handler(lambda _source: False),
        aten.empty_like.default: _empty_like,
        aten.ones_like.default: _empty_like,
        aten.zeros_like.default: _empty_like,
        aten.randn_like.default: _empty_like,
        **_elementwise(),
    }
)
