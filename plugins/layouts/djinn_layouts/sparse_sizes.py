"""Ops that resize a sparse tensor in place, such as `resize_as_sparse_` and `sparse_resize_`.

The client resizes the parts without asking the executor. New elements are undefined, as on the CPU.
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

_HOW: Final = (
    "You could try creating an empty tensor of the new size, or use .clone() and a new tensor of its indices and values"
)


def resize_as_sparse(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Handle `resize_as_sparse_`, and `resize_as_` of sparse tensors.

    Raises:
        RuntimeError: the layouts differ, or the size is too small for the elements of the first tensor.
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
        return _as_compressed(target, template)
    if not (isinstance(target, SparseTensor) and isinstance(template, SparseTensor)):
        raise RuntimeError("resize_as_sparse_: both tensors must be sparse")  # noqa: TRY004 - as PyTorch
    sparse_dim = int(template.held_indices.shape[0])
    if tuple(target.shape) == tuple(template.shape) and target.held_indices.shape[0] == sparse_dim:
        return target
    return _resized(target, list(template.shape), sparse_dim)


def _check_compressed(name: str, given: torch.Tensor) -> None:
    if not isinstance(given, CompressedTensor):
        raise RuntimeError(  # noqa: TRY004 - as PyTorch
            f"resize_as_sparse_compressed_: {name}  expected sparse compressed tensor layout but got {given.layout}"
        )


def sparse_resize(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Handle `sparse_resize_(size, sparse_dim, dense_dim)`.

    Raises:
        RuntimeError: the tensor has elements, and would lose a dimension or a part of one.
    """
    _check_dims(*args[1:])
    return _resized(args[0], list(args[1]), args[2])


def resize_and_clear(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Handle `sparse_resize_and_clear_`, after which the tensor has no elements.

    Raises:
        RuntimeError: the size has another number of dimensions.
    """
    target, size, sparse_dim = args[0], list(args[1]), args[2]
    _check_dims(*args[1:])
    indices = record(aten.new_zeros.default, (target.held_indices, [sparse_dim, 0]), {})
    values = record(aten.new_zeros.default, (target.held_values, [0, *size[sparse_dim:]]), {})
    return _become(target, wrap_sparse(indices, values, tuple(size), coalesced=True))


def resize_compressed(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Handle `resize_` of a CSR tensor.

    Raises:
        RuntimeError: the tensor has fewer than two dimensions, or would lose columns.
    """
    target, size = args[0], list(args[1])
    if len(size) < 2:
        raise RuntimeError(f"torch.resize_: Only batched sparse CSR matrices are supported, but got size {size}")
    if target.shape[-1] > size[-1]:
        raise RuntimeError(
            "torch.resize_: Resizing columns of sparse CSR tensors to a smaller value is not supported. The original number of columns "
            f"is {target.shape[-1]} while the requested new number of columns is {size[-1]}."
        )
    rows, nnz, before = size[-2], int(target.held_plain.shape[-1]), int(target.held_compressed.shape[-1])
    count = min(nnz, rows * size[-1])
    compressed = _resize(target.held_compressed, [*size[:-2], rows + 1])
    if rows + 1 >= before:
        compressed[..., before:] = nnz
    else:
        compressed[..., rows:] = count
    plain_indices, values = (
        _resize(target.held_plain, [*size[:-2], count]),
        _resize(target.held_values, [*size[:-2], count]),
    )
    return _become(target, wrap_compressed(target.held_layout, compressed, plain_indices, values, size))


def _as_compressed(target: CompressedTensor, template: CompressedTensor) -> CompressedTensor:
    parts = [
        _resize(part, list(like.shape)) if part.shape != like.shape else part
        for part, like in (
            (target.held_compressed, template.held_compressed),
            (target.held_plain, template.held_plain),
            (target.held_values, template.held_values),
        )
    ]
    compressed, plain_indices, values = parts
    if target.shape != template.shape or target.dense() != template.dense():
        record(aten.copy_.default, (compressed, template.held_compressed), {})
        record(aten.copy_.default, (plain_indices, template.held_plain), {})
    return _become(target, wrap_compressed(target.held_layout, compressed, plain_indices, values, template.shape))  # type: ignore[return-value]


def _resized(target: SparseTensor, size: list[int], sparse_dim: int) -> PartsTensor:
    count, old_sparse, old = int(target.held_values.shape[0]), int(target.held_indices.shape[0]), list(target.shape)
    if count:
        _check_kept("sparse", old[:old_sparse], size[:sparse_dim])
        _check_kept("dense", old[old_sparse:], size[sparse_dim:])
    indices, values = target.held_indices, target.held_values
    if list(values.shape) != [count, *size[sparse_dim:]]:
        values = _resize(values, [count, *size[sparse_dim:]])
    if indices.shape[0] != sparse_dim:
        indices = _resize(indices, [sparse_dim, count])
    return _become(target, wrap_sparse(indices, values, tuple(size), coalesced=target.coalesced))


def _check_dims(size: Sequence[int], sparse_dim: int, dense_dim: int) -> None:
    if len(size) != sparse_dim + dense_dim:
        raise RuntimeError(
            f"'len(size) == sparse_dim + dense_dim' is not satisfied: len(size)={len(size)}, sparse_dim={sparse_dim}, dense_dim={dense_dim}"
        )


def _check_kept(kind: str, old: list[int], new: list[int]) -> None:
    if len(old) != len(new):
        raise RuntimeError(
            f"changing the number of {kind} dimensions (from {len(old)} to {len(new)}) on a non-empty sparse tensor is not supported. {_HOW}"
        )
    if any(now < before for before, now in zip(old, new, strict=True)):
        raise RuntimeError(
            f"shrinking the size of {kind} dimensions (from {old} to {new}) on a non-empty sparse tensor is not supported. {_HOW}"
        )


def _resize(part: LazyTensor, size: Sequence[int]) -> LazyTensor:
    """Resize a part in place, as PyTorch does."""
    record(aten.resize_.default, (part, list(size)), {})
    return part


def _become(target: PartsTensor, made: PartsTensor) -> PartsTensor:
    target.data = made  # changes the size
    target.become(made)
    return target
