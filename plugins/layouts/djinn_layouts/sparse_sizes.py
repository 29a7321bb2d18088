"""Ops that resize a sparse tensor in place, such as `resize_as_sparse_` and `sparse_resize_`.

The client records resizes of the parts, without a round trip. New elements are undefined, as on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from djinn_client.interception.handler_support import LazyTensor, record
from djinn_layouts.compressed_tensor import CompressedTensor, wrap_compressed
from djinn_layouts.parts_tensor import PartsTensor
from djinn_layouts.sparse_tensor import SparseTensor, wrap_sparse

aten = torch.ops.aten

_INSTRUCTIONS: Final = (
    "You could try creating an empty tensor of the new size, or use .clone() and a new tensor of its indices and values"
)


def resize_as_sparse(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Handle `resize_as_sparse_`, and `resize_as_` of sparse tensors.

    Raises:
        RuntimeError: the layouts differ, or the new size is too small for existing elements.
    """
    target, template = args[0], args[1]
    if isinstance(target, CompressedTensor) or isinstance(template, CompressedTensor):
        _check_compressed("self", target)
        _check_compressed("src", template)
        if target.layout != template.layout:
            raise RuntimeError(
                "resize_as_sparse_compressed_tensor_: self and src must have the same layout, but got: "
                f"self ({target.layout}) and source ({template.layout})"
            )
        return _resize_as_compressed(target, template)
    if not (isinstance(target, SparseTensor) and isinstance(template, SparseTensor)):
        raise RuntimeError("resize_as_sparse_: both tensors must be sparse")  # noqa: TRY004 - as PyTorch
    sparse_dim = int(template.held_indices.shape[0])
    if tuple(target.shape) == tuple(template.shape) and target.held_indices.shape[0] == sparse_dim:
        return target
    return _resize_parts(target, list(template.shape), sparse_dim)


def _check_compressed(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, CompressedTensor):
        raise RuntimeError(  # noqa: TRY004 - as PyTorch
            f"resize_as_sparse_compressed_: {name}  expected sparse compressed tensor layout but got {tensor.layout}"
        )


def sparse_resize(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Handle `sparse_resize_(size, sparse_dim, dense_dim)`.

    Raises:
        RuntimeError: the tensor has elements, and the new size changes its number of dimensions or shrinks one of them.
    """
    _check_dims(*args[1:])
    return _resize_parts(args[0], list(args[1]), args[2])


def resize_and_clear(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Handle `sparse_resize_and_clear_`, after which the tensor has no elements.

    Raises:
        RuntimeError: the size does not have `sparse_dim + dense_dim` dimensions.
    """
    target, size, sparse_dim = args[0], list(args[1]), args[2]
    _check_dims(*args[1:])
    indices = record(aten.new_zeros.default, (target.held_indices, [sparse_dim, 0]), {})
    values = record(aten.new_zeros.default, (target.held_values, [0, *size[sparse_dim:]]), {})
    return _replace_parts(target, wrap_sparse(indices, values, tuple(size), coalesced=True))


def resize_compressed(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Handle `resize_` of a CSR tensor.

    Raises:
        RuntimeError: the new size has fewer than two dimensions, or fewer columns than the tensor.
    """
    target, size = args[0], list(args[1])
    if len(size) < 2:
        raise RuntimeError(f"torch.resize_: Only batched sparse CSR matrices are supported, but got size {size}")
    if target.shape[-1] > size[-1]:
        raise RuntimeError(
            "torch.resize_: Resizing columns of sparse CSR tensors to a smaller value is not supported. The original number of columns "
            f"is {target.shape[-1]} while the requested new number of columns is {size[-1]}."
        )
    rows, nnz, old_length = size[-2], int(target.held_plain.shape[-1]), int(target.held_compressed.shape[-1])
    count = min(nnz, rows * size[-1])
    compressed = _resize(target.held_compressed, [*size[:-2], rows + 1])
    if rows + 1 >= old_length:
        compressed[..., old_length:] = nnz
    else:
        compressed[..., rows:] = count
    plain_indices, values = (
        _resize(target.held_plain, [*size[:-2], count]),
        _resize(target.held_values, [*size[:-2], count]),
    )
    return _replace_parts(target, wrap_compressed(target.held_layout, compressed, plain_indices, values, size))


def _resize_as_compressed(target: CompressedTensor, template: CompressedTensor) -> CompressedTensor:
    parts = [
        _resize(part, list(template_part.shape)) if part.shape != template_part.shape else part
        for part, template_part in (
            (target.held_compressed, template.held_compressed),
            (target.held_plain, template.held_plain),
            (target.held_values, template.held_values),
        )
    ]
    compressed, plain_indices, values = parts
    if target.shape != template.shape or target.dense_dim_count() != template.dense_dim_count():
        record(aten.copy_.default, (compressed, template.held_compressed), {})
        record(aten.copy_.default, (plain_indices, template.held_plain), {})
    return _replace_parts(
        target, wrap_compressed(target.held_layout, compressed, plain_indices, values, template.shape)
    )  # type: ignore[return-value]


def _resize_parts(target: SparseTensor, size: list[int], sparse_dim: int) -> PartsTensor:
    count, old_sparse, old = int(target.held_values.shape[0]), int(target.held_indices.shape[0]), list(target.shape)
    if count:
        _check_preserved_dims("sparse", old[:old_sparse], size[:sparse_dim])
        _check_preserved_dims("dense", old[old_sparse:], size[sparse_dim:])
    indices, values = target.held_indices, target.held_values
    if list(values.shape) != [count, *size[sparse_dim:]]:
        values = _resize(values, [count, *size[sparse_dim:]])
    if indices.shape[0] != sparse_dim:
        indices = _resize(indices, [sparse_dim, count])
    return _replace_parts(target, wrap_sparse(indices, values, tuple(size), coalesced=target.coalesced))


def _check_dims(size: Sequence[int], sparse_dim: int, dense_dim: int) -> None:
    if len(size) != sparse_dim + dense_dim:
        raise RuntimeError(
            f"'len(size) == sparse_dim + dense_dim' is not satisfied: len(size)={len(size)}, sparse_dim={sparse_dim}, dense_dim={dense_dim}"
        )


def _check_preserved_dims(kind: str, old: list[int], new: list[int]) -> None:
    if len(old) != len(new):
        raise RuntimeError(
            f"changing the number of {kind} dimensions (from {len(old)} to {len(new)}) on a non-empty sparse tensor is not supported. {_INSTRUCTIONS}"
        )
    if any(new_size < old_size for old_size, new_size in zip(old, new, strict=True)):
        raise RuntimeError(
            f"shrinking the size of {kind} dimensions (from {old} to {new}) on a non-empty sparse tensor is not supported. {_INSTRUCTIONS}"
        )


def _resize(part: LazyTensor, size: Sequence[int]) -> LazyTensor:
    """Resize a part in place, as PyTorch does."""
    record(aten.resize_.default, (part, list(size)), {})
    return part


def _replace_parts(target: PartsTensor, source: PartsTensor) -> PartsTensor:
    target.data = source  # changes the size
    target.take_parts_of(source)
    return target
