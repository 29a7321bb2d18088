"""Ops on sparse CSR, CSC, BSR and BSC tensors that run on the client: metadata, parts, construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from djinn_client import torch_dispatch
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
from djinn_layouts.compressed_tensor import (
    BY_ROWS,
    IN_BLOCKS,
    LAYOUTS,
    CompressedTensor,
    wrap_compressed,
)
from djinn_layouts.sparse_sizes import resize_as_sparse, resize_compressed

aten = torch.ops.aten


def _layout(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> torch.layout:
    return args[0].held_layout  # type: ignore[no-any-return]


def _part(name: str, attribute: str, by_rows: bool) -> Handler:
    """Return the handler of an op such as `crow_indices`, which returns indices.

    `name`: name of the op. `attribute`: attribute of `CompressedTensor` with the indices. `by_rows`: True if the op
    exists for CSR and BSR, False if it exists for CSC and BSC.
    """

    def part(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        source = args[0]
        if (source.held_layout in BY_ROWS) != by_rows:
            kind, layout_name = (
                "row" if by_rows else "column",
                str(source.held_layout).removeprefix("torch.sparse_").capitalize(),
            )
            raise RuntimeError(f"{name} expected sparse {kind} compressed tensor layout but got Sparse{layout_name}")
        return record(aten.detach.default, (getattr(source, attribute),), {})

    return part


def _values(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return record(aten.detach.default, (args[0].held_values,), {})


def _nnz(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return int(args[0].held_plain.shape[-1])


def _sparse_dim(_func: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return 2


def _dense_dim(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return args[0].dense_dim_count()  # type: ignore[no-any-return]


def _map_parts(source: CompressedTensor, make: Callable[[LazyTensor], Any]) -> tuple[Any, Any, Any]:
    return make(source.held_compressed), make(source.held_plain), make(source.held_values)


def _detach(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    source = args[0]
    return wrap_compressed(source.held_layout, *_map_parts(source, lambda part: part), source.shape)


def _clone(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    source = args[0]
    parts = _map_parts(source, lambda part: record(aten.clone.default, (part,), {}))
    return wrap_compressed(source.held_layout, *parts, source.shape)


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, device, dtype = args[0], kwargs.get("device"), kwargs.get("dtype")
    if kwargs.get("layout") not in {None, source.held_layout}:
        raise UnsupportedOperation(
            f".to() cannot convert a tensor of layout {source.held_layout} on {DEVICE_NAME} to layout {kwargs['layout']}: "
            "use .to_sparse(layout=...)"
        )
    if device is not None and not is_remote(device):
        return _fetch_to_cpu(source).to(device=device, dtype=dtype)
    device_option = {"device": device} if device is not None else {}
    keywords = {**device_option, "dtype": dtype} if dtype is not None else device_option
    compressed, plain_indices = (
        record(func, (part,), device_option) for part in (source.held_compressed, source.held_plain)
    )
    return wrap_compressed(
        source.held_layout, compressed, plain_indices, record(func, (source.held_values,), keywords), source.shape
    )


def _fetch_to_cpu(source: CompressedTensor) -> torch.Tensor:
    return torch.sparse_compressed_tensor(
        *_map_parts(source, fetch), tuple(source.shape), layout=source.held_layout, check_invariants=False, device="cpu"
    )


def _upload_parts(source: torch.Tensor, device: int) -> tuple[LazyTensor, LazyTensor, LazyTensor]:
    compressed, plain_indices, values = torch_layouts.compressed_parts(source.detach())
    return upload_copy(compressed, device), upload_copy(plain_indices, device), upload_copy(values, device)


def _copy(func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if (
        not isinstance(source, CompressedTensor)
        and isinstance(target, CompressedTensor)
        and not is_remote(source.device)
    ):
        index = target.held_values.remote.meta.device
        source = wrap_compressed(source.layout, *_upload_parts(source.to(target.dtype), index), source.shape)
    if not is_remote(target.device):
        return target.copy_(_fetch_to_cpu(source))
    return call(func, (target, source), {})


def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `empty_like`, which copies the indices of its source, and `zeros_like`, whose result has no elements."""
    source, device = args[0], kwargs.get("device")
    dtype, layout = kwargs.get("dtype") or source.dtype, kwargs.get("layout") or source.held_layout
    if layout not in LAYOUTS or (device is not None and not is_remote(device)):
        options = {"dtype": dtype, "device": device or source.device}
        if layout is not torch.sparse_coo:
            return torch.zeros(source.shape, layout=layout, **options)
        dims = source.dim() - source.dense_dim_count(), source.dense_dim_count()
        return aten._sparse_coo_tensor_with_dims.default(*dims, tuple(source.shape), layout=layout, **options)
    if func is aten.empty_like.default:
        if layout != source.held_layout:
            raise RuntimeError(
                f"empty_like with different sparse layout is not supported (self is {source.held_layout} but you requested {layout})"
            )
        compressed, plain_indices = (
            record(aten.clone.default, (part,), {}) for part in (source.held_compressed, source.held_plain)
        )
        values = record(aten.zeros_like.default, (source.held_values,), {"dtype": dtype})
        return wrap_compressed(layout, compressed, plain_indices, values, source.shape)
    batch = source.held_compressed.dim() - 1
    blocks = list(source.held_values.shape[batch + 1 : batch + 3]) if source.held_layout in IN_BLOCKS else []
    if bool(blocks) != (layout in IN_BLOCKS):
        raise RuntimeError(
            f"zeros_like: layout {layout} needs a block size, which a tensor of layout {source.held_layout} does not have"
            if layout in IN_BLOCKS
            else f"zeros_like: blocksize cannot be specified for non-block layout {layout}"
        )
    return _without_elements(source.shape, layout, dtype, source.held_values.device, batch, blocks)


def _without_elements(
    shape: Sequence[int], layout: torch.layout, dtype: torch.dtype, device: torch.device, batch: int, block: list[int]
) -> CompressedTensor:
    """Return a tensor without elements. `batch`: number of batch dimensions. `block`: sizes of a block, or empty."""
    batch_sizes, matrix_sizes, dense_sizes = (
        list(shape[:batch]),
        list(shape[batch : batch + 2]),
        list(shape[batch + 2 :]),
    )
    compressed_dim = 0 if layout in BY_ROWS else 1
    count = matrix_sizes[compressed_dim] // (block[compressed_dim] if block else 1)
    index_options = {"dtype": torch.int64, "device": device}
    compressed = record(aten.zeros.default, ([*batch_sizes, count + 1],), index_options)
    plain_indices = record(aten.zeros.default, ([*batch_sizes, 0],), index_options)
    values = record(aten.zeros.default, ([*batch_sizes, 0, *block, *dense_sizes],), {"dtype": dtype, "device": device})
    return wrap_compressed(layout, compressed, plain_indices, values, tuple(shape))


def _fill_normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    record(func, (args[0].held_values, *args[1:]), kwargs)
    return args[0]


def _is_pinned(_func: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    return False


def empty(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Handle `torch.empty` and `torch.zeros` with a compressed sparse layout."""
    size, layout, device = args[0], kwargs["layout"], kwargs.get("device")
    if layout in IN_BLOCKS or len(size) < 2:
        raise RuntimeError(
            f"torch.empty: Only batched sparse compressed (non-block) tensors are supported, but got size {list(size)} "
            f"and layout {layout}"
        )
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return _without_elements(size, layout, dtype, logical_device(index_of(device)), len(size) - 2, [])


def _with_dims(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Handle `aten::_sparse_compressed_tensor_with_dims`: return a tensor with zeros as indices and values."""
    nnz, dense_dim, size, blocksize, index_dtype = args
    layout, device = kwargs["layout"], logical_device(index_of(kwargs.get("device")))
    batch, block = list(size[: len(size) - 2 - dense_dim]), list(blocksize)
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    empty_tensor = _without_elements(size, layout, dtype, device, len(batch), block)
    dense = list(size[len(size) - dense_dim :]) if dense_dim else []
    compressed = record(aten._to_copy.default, (empty_tensor.held_compressed,), {"dtype": index_dtype})
    plain_indices = record(aten.zeros.default, ([*batch, nnz],), {"dtype": index_dtype, "device": device})
    values = record(aten.zeros.default, ([*batch, nnz, *block, *dense],), {"dtype": dtype, "device": device})
    return wrap_compressed(layout, compressed, plain_indices, values, tuple(size))


def upload_compressed(source: torch.Tensor, index: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a copy of a CPU tensor on remote device number `index`, converted to `dtype` if it is not None."""
    parts = _upload_parts(source if dtype is None else source.to(dtype), index)
    return wrap_compressed(source.layout, *parts, tuple(source.shape))


def _of_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `torch.sparse_csr_tensor` and similar functions. The executor checks the parts at their first use."""
    compressed, plain_indices, values, size = args
    if not all(isinstance(part, LazyTensor) for part in (compressed, plain_indices, values)):
        raise RuntimeError(
            "device of compressed_indices, plain_indices and values must match, and be a device of remote tensors"
        )
    layout, dtype = kwargs.get("layout") or torch.sparse_csr, kwargs.get("dtype")
    checks = func is not aten._sparse_compressed_tensor_unsafe.default
    if checks and torch.sparse.check_sparse_tensor_invariants.is_enabled():
        call(
            aten._validate_sparse_compressed_tensor_args.default,
            (compressed, plain_indices, values, list(size), layout),
            {},
        )
    if dtype is not None and dtype != values.dtype:
        values = record(aten._to_copy.default, (values,), {"dtype": dtype})
    return wrap_compressed(layout, compressed, plain_indices, values, tuple(int(n) for n in size))


def _unsafe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `_sparse_compressed_tensor_unsafe`, which PyTorch calls for gradients of compressed sparse tensors."""
    if all(is_remote(part.device) and not isinstance(part, LazyTensor) for part in args[:3]):  # tensors of a tracer
        return _run_composite(func, args, kwargs)
    with torch.no_grad():
        return _of_parts(func, args, kwargs)


def _run_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kernel = torch_dispatch.composite_kernel(func)
    assert kernel is not None
    return kernel(*args, **kwargs)


def _indices_of_rows(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert CSR indices to COO indices by ops that check them, because PyTorch's kernel does not check them."""
    compressed, plain_indices = args[0], args[1]
    if compressed.dim() != 1:
        raise UnsupportedOperation(f"aten::_convert_indices_from_csr_to_coo supports no batches on {DEVICE_NAME}")
    counts = compressed.diff()
    rows = torch.arange(counts.shape[0], device=plain_indices.device).repeat_interleave(counts)
    indices = torch.stack([plain_indices, rows] if kwargs.get("transpose") else [rows, plain_indices])
    return indices.to(torch.int32 if kwargs.get("out_int32") else torch.int64)


# ops that run without the executor
LOCAL: Final[Mapping[Any, Handler]] = MappingProxyType(
    {
        torch.ops.prim.layout.default: _layout,
        aten.crow_indices.default: _part("crow_indices", "held_compressed", by_rows=True),
        aten.col_indices.default: _part("col_indices", "held_plain", by_rows=True),
        aten.ccol_indices.default: _part("ccol_indices", "held_compressed", by_rows=False),
        aten.row_indices.default: _part("row_indices", "held_plain", by_rows=False),
        aten.values.default: _values,
        aten._nnz.default: _nnz,
        aten.sparse_dim.default: _sparse_dim,
        aten.dense_dim.default: _dense_dim,
        aten.detach.default: _detach,
        aten.alias.default: _detach,
        aten.clone.default: _clone,
        aten._to_copy.default: _to_copy,
        aten.copy_.default: _copy,
        aten.zeros_like.default: _empty_like,
        aten.empty_like.default: _empty_like,
        aten.normal_.default: _fill_normal,
        aten.is_pinned.default: _is_pinned,
        aten.resize_.default: resize_compressed,
        aten.resize_as_.default: resize_as_sparse,
        aten.resize_as_sparse_.default: resize_as_sparse,
    }
)

# Ops that make a compressed sparse tensor from strided tensors.
MAKERS: Final[Mapping[Any, Handler]] = MappingProxyType(
    {
        aten._convert_indices_from_csr_to_coo.default: _indices_of_rows,
        aten._sparse_compressed_tensor_unsafe.default: _unsafe,
        aten._sparse_compressed_tensor_with_dims.default: _with_dims,
        aten.sparse_compressed_tensor.comp_plain_value: _run_composite,  # without a size, which follows from the indices
        aten.sparse_compressed_tensor.comp_plain_value_size: _of_parts,
    }
)
