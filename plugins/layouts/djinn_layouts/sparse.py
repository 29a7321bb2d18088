"""Ops on sparse COO tensors that run on the client: metadata, parts, construction from indices and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from djinn_core.torch_private import schema_of
from djinn_layouts import torch_layouts
from djinn_layouts.calls import call
from djinn_layouts.sparse_sizes import resize_and_clear, resize_as_sparse, sparse_resize
from djinn_layouts.sparse_tensor import SparseTensor, wrap_sparse

aten = torch.ops.aten


def _indices(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return record(aten.detach.default, (args[0].held_indices,), {})


def _values(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return record(aten.detach.default, (args[0].held_values,), {})


def _coalesced_part(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args[0].coalesced:
        name = "indices" if func is aten.indices.default else "values"
        raise RuntimeError(f"Cannot get {name} on an uncoalesced tensor, please call .coalesce() first")
    return (_indices if func is aten.indices.default else _values)(func, args, kwargs)


def _nnz(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return int(args[0].held_values.shape[0])


def _sparse_dim(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return int(args[0].held_indices.shape[0])


def _dense_dim(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return args[0].held_values.dim() - 1  # type: ignore[no-any-return]


def _is_coalesced(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    return bool(args[0].coalesced)


def _set_coalesced(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    args[0].coalesced = bool(args[1])
    return args[0]


def _detach(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    source = args[0]
    return wrap_sparse(source.held_indices, source.held_values, source.shape, source.coalesced)


def _clone(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    source = args[0]
    indices = record(aten.clone.default, (source.held_indices,), {})
    return wrap_sparse(indices, record(aten.clone.default, (source.held_values,), {}), source.shape, source.coalesced)


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, device = args[0], kwargs.get("device")
    if kwargs.get("layout") not in {None, torch.sparse_coo}:
        raise UnsupportedOperation(
            f".to() cannot convert a sparse tensor on {DEVICE_NAME} to layout {kwargs['layout']}"
        )
    if device is not None and not is_remote(device):
        return _fetch_to_cpu(source).to(device=device, dtype=kwargs.get("dtype"))
    keywords = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
    device_option = {"device": device} if device is not None else {}
    indices = record(func, (source.held_indices,), device_option)
    return wrap_sparse(indices, record(func, (source.held_values,), keywords), source.shape, source.coalesced)


def _fetch_to_cpu(source: SparseTensor) -> torch.Tensor:
    indices, values = fetch(source.held_indices), fetch(source.held_values)
    return torch.sparse_coo_tensor(
        indices, values, tuple(source.shape), check_invariants=False, is_coalesced=source.coalesced, device="cpu"
    )


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if isinstance(target, SparseTensor) and not isinstance(source, (SparseTensor, LazyTensor)):
        if source.layout != torch.sparse_coo:
            raise UnsupportedOperation(f"copy_ cannot copy a tensor of layout {source.layout} into a sparse tensor")
        target.held_indices, target.held_values = _upload_parts(
            source.to(target.dtype), target.held_values.remote.meta.device
        )
        target.coalesced = source.is_coalesced()
        return target
    if not isinstance(target, (SparseTensor, LazyTensor)):
        return target.copy_(_fetch_to_cpu(source))
    return call(func, args, kwargs)


def _upload_parts(source: torch.Tensor, device: int) -> tuple[LazyTensor, LazyTensor]:
    indices, values = torch_layouts.sparse_parts(source)
    return upload_copy(indices, device), upload_copy(values, device)


def _zeros_like(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, dtype = args[0], kwargs.get("dtype")
    device = kwargs.get("device")
    if kwargs.get("memory_format") is not None and kwargs.get("layout") != torch.strided:
        raise RuntimeError("memory format option is only supported by strided tensors")
    if kwargs.get("layout") not in {None, torch.sparse_coo} or (device is not None and not is_remote(device)):
        layout = kwargs.get("layout") or torch.sparse_coo
        return torch.zeros(source.shape, dtype=dtype or source.dtype, device=device or source.device, layout=layout)
    sparse = int(source.held_indices.shape[0])
    return _without_elements(source.shape, sparse, dtype or source.dtype, source.held_values.device)


def _without_elements(shape: Sequence[int], sparse_dim: int, dtype: torch.dtype, device: torch.device) -> SparseTensor:
    indices = record(aten.zeros.default, ([sparse_dim, 0],), {"dtype": torch.int64, "device": device})
    values = record(aten.zeros.default, ([0, *shape[sparse_dim:]],), {"dtype": dtype, "device": device})
    return wrap_sparse(indices, values, tuple(shape), coalesced=True)


def _is_pinned(_func: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    return False


def empty(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Handle `torch.empty` and `torch.zeros` with the layout `torch.sparse_coo`."""
    return _on_device(len(args[0]), args[0], kwargs)


def _with_dims(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return _on_device(args[0], args[2], kwargs)


def _on_device(sparse_dim: int, size: Sequence[int], options: Mapping[str, Any]) -> torch.Tensor:
    dtype = options.get("dtype") or torch.get_default_dtype()
    return _without_elements(size, sparse_dim, dtype, logical_device(index_of(options.get("device"))))


def _with_tensors(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `aten::_sparse_coo_tensor_with_dims_and_tensors`: return a sparse tensor with these indices and values."""
    sparse_dim, dense_dim, size, indices, values = args
    if not isinstance(values, LazyTensor) or not isinstance(indices, LazyTensor):
        raise RuntimeError("indices and values must be on the same device")  # noqa: TRY004 - as PyTorch
    if indices.dim() != 2 or indices.shape[0] != sparse_dim or len(size) != sparse_dim + dense_dim:
        raise RuntimeError(
            "number of dimensions must be sparse_dim + dense_dim, and indices a matrix of sparse_dim rows"
        )
    _check_sizes(list(values.shape or (1,)), [int(indices.shape[1]), *map(int, size[sparse_dim:])])
    dtype = kwargs.get("dtype")
    if dtype is not None and dtype != values.dtype:
        values = record(aten._to_copy.default, (values,), {"dtype": dtype})
    return wrap_sparse(indices, values, tuple(int(n) for n in size), bool(kwargs.get("is_coalesced")))


def _check_sizes(elements: list[int], expected: list[int]) -> None:
    if elements[0] != expected[0]:
        counts = f"nnz from indices: {expected[0]}, nnz from values: {elements[0]}"
        raise RuntimeError(f"indices and values must have same nnz, but got {counts}")
    if elements != expected:
        raise RuntimeError(f"values has incorrect size, expected {expected}, got {elements}")


def _run_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite op that makes a sparse tensor from strided tensors. The executor checks the parts at their first use."""
    kernel = torch_dispatch.composite_kernel(func)
    assert kernel is not None
    return kernel(*args, **kwargs)


def _embedding_bag_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the sparse gradient of an `nn.EmbeddingBag` table, composed of other ops."""
    arguments = {
        argument.name: value for argument, value in zip(schema_of(func).arguments, args, strict=False)
    } | kwargs
    indices, bags = arguments["indices"], arguments["offset2bag"]
    if bags.numel() == 0:  # as the executor's op does if the forward pass did not compute it
        bags = torch.zeros(indices.shape[0] + 1, dtype=indices.dtype, device=indices.device)
        bags = bags.index_add_(0, arguments["offsets"], torch.ones_like(arguments["offsets"]))
        bags[0] -= 1
        bags = bags.cumsum(0)[: indices.shape[0]]
    return aten._embedding_bag_sparse_backward.default(
        arguments["grad"], indices, arguments["offsets"], bags, arguments["bag_size"], arguments["num_weights"],
        arguments["scale_grad_by_freq"], arguments["mode"], arguments.get("per_sample_weights"), arguments.get("padding_idx", -1)
    )  # fmt: skip


# ops that run without the executor
LOCAL: Final[Mapping[Any, Handler]] = MappingProxyType(
    {
        aten._indices.default: _indices,
        aten._values.default: _values,
        aten.indices.default: _coalesced_part,
        aten.values.default: _coalesced_part,
        aten._nnz.default: _nnz,
        aten.sparse_dim.default: _sparse_dim,
        aten._dimI.default: _sparse_dim,
        aten.dense_dim.default: _dense_dim,
        aten._dimV.default: _dense_dim,
        aten.is_coalesced.default: _is_coalesced,
        aten._coalesced_.default: _set_coalesced,
        aten.detach.default: _detach,
        aten.alias.default: _detach,
        aten.clone.default: _clone,
        aten._to_copy.default: _to_copy,
        aten.copy_.default: _copy,
        aten.zeros_like.default: _zeros_like,
        aten.empty_like.default: _zeros_like,
        aten.is_pinned.default: _is_pinned,
        aten.resize_as_.default: resize_as_sparse,
        aten.resize_as_sparse_.default: resize_as_sparse,
        aten.sparse_resize_.default: sparse_resize,
        aten.sparse_resize_and_clear_.default: resize_and_clear,
        aten._sparse_coo_tensor_with_dims_and_tensors.default: _with_tensors,
    }
)

# Constructors from other tensors.
MAKERS: Final[Mapping[Any, Handler]] = MappingProxyType(
    {
        aten._embedding_bag_backward.default: _embedding_bag_backward,
        aten._embedding_bag_sparse_backward.default: _run_composite,
        aten._sparse_coo_tensor_unsafe.default: _run_composite,  # PyTorch calls this to move a sparse CPU tensor to the device
        aten._sparse_coo_tensor_with_dims.default: _with_dims,
        aten._sparse_coo_tensor_with_dims_and_tensors.default: _with_tensors,
        aten.embedding_sparse_backward.default: _run_composite,
    }
)
