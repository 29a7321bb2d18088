"""Constant folding on the client: tables of ops whose results follow from known contents.

C++ notes the calls of these ops (`djinn_native/csrc/known.cpp`), and computes a result when the program reads it.
Handlers of this module run only if a result's size depends on known contents, or to test a number that is fetched
anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from djinn_client.interception.dispatch import handles, record
from djinn_client.interception.sync import known_elements
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.interception.tensors.upload import upload_copy, upload_dense

aten: Final = torch.ops.aten
FOLDS, FLOATS, SIZES, MASKS = 2, 16, 32, 64  # op flags; `OpFlag` in remote.h has the same
_COMPARISONS: Final = ("eq", "ne", "lt", "le", "gt", "ge")
_OF_FLOATS: Final = (  # ops whose float results are exact, too
    *(getattr(getattr(aten, name), kind) for name in _COMPARISONS for kind in ("Scalar", "Tensor")),
    *(getattr(aten, name).default for name in ("logical_and", "logical_or", "logical_not", "all", "any")),
    *(aten.all.dim, aten.any.dim),
)
_OF_INTEGERS: Final = (
    *(getattr(aten, name).Tensor for name in ("add", "sub", "mul", "bitwise_and", "bitwise_or", "bitwise_xor")),
    *(getattr(aten, name).default for name in ("bitwise_not", "neg", "abs", "cat", "stack", "clone", "repeat", "flip")),
    *(getattr(aten, name).default for name in ("cumsum", "sum", "max", "min", "amax", "amin", "_to_copy")),
    *(aten.sum.dim_IntList, aten.where.self, aten.masked_fill.Scalar, aten.isin.Tensor_Tensor),
    *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.masked_fill_.Scalar),
)
_OF_SIZES: Final = (  # ops that read only numbers and metadata
    *(getattr(aten, name).default for name in ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros")),
    *(getattr(aten, name).default for name in ("new_full", "full", "ones", "zeros", "scalar_tensor")),
    aten.fill_.Scalar,
)
_OF_INTEGER_SIZES: Final = (
    *(aten.arange.start_step, aten.eye.default, aten.eye.m, aten.tril_indices.default, aten.triu_indices.default),
)
FLAGS: Final = {  # by the id of the op: hashing an op runs Python code
    **{id(func): FOLDS for func in _OF_INTEGERS},
    **{id(func): FOLDS | FLOATS for func in _OF_FLOATS},
    **{id(func): SIZES for func in _OF_INTEGER_SIZES},
    **{id(func): SIZES | FLOATS for func in _OF_SIZES},
    id(aten.index.Tensor): FOLDS | MASKS,
}


@handles(aten.nonzero.default)
def find_nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `aten::nonzero`: upload the indices of the nonzero elements if the client knows the contents.

    The size of the result is then known. Otherwise record the op.
    """
    positions = _nonzero(args[0])
    if positions is None:
        return record(func, args, kwargs)
    return upload_dense(positions, args[0].remote.meta.device)


@handles(aten.index.Tensor, repeats=True)
def index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `aten::index`: replace a mask whose contents are known by indices, so that the size of the result is known."""
    source, indices = args
    if any(isinstance(i, LazyTensor) and i.dtype is torch.bool for i in indices):
        args = source, [*_without_masks(source.shape, indices)]
    return record(func, args, kwargs)


def _without_masks(shape: torch.Size, indices: Iterable[Any]) -> Iterator[Any]:
    """Yield the indices. Replace each mask whose contents are known by the indices of its True elements, per dimension."""
    dim = 0
    for index in indices:
        is_mask = isinstance(index, LazyTensor) and index.dtype is torch.bool
        width = index.dim() if is_mask else 1
        fits = is_mask and width > 0 and shape[dim : dim + width] == index.shape
        positions = _nonzero(index) if fits else None
        if positions is None:
            yield index
        else:
            yield from [upload_copy(column, index.remote.meta.device) for column in positions.unbind(1)]
        dim += width


def _nonzero(tensor: Any) -> torch.Tensor | None:
    elements = known_elements(tensor.remote) if isinstance(tensor, LazyTensor) else None
    return None if elements is None else elements.nonzero()


@handles(aten.isnan.default, aten.isinf.default)
def is_no_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `isnan` and `isinf`: record the op.

    If the operand has a single element, a read of the result fetches the operand instead. So `isnan(x) or isinf(x)`
    takes one round trip.
    """
    result = record(func, args, kwargs)
    value = args[0].remote
    if value.meta.numel == 1:
        result.remote.storage.contents.test = func, value, value.storage.version
    return result
