"""View formulas: metadata of views, from the metadata of their base and their arguments.

A formula returns shape, strides and offset (elements) of each view, or None if the arguments do not fit or need a closer
look: the meta kernel is then run, and raises the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from djinn_core.ir.values import TensorMeta, contiguous_strides

Place = tuple[tuple[int, ...], tuple[int, ...], int]
Formula = Callable[[TensorMeta, Sequence[Any], Mapping[str, Any]], Sequence[Place] | None]

aten = torch.ops.aten
LARGEST: Final = 1 << 60  # elements of a view; beyond that PyTorch's own arithmetic overflows, and it says so


def view_formula(func: Any) -> Formula | None:
    """The formula of an op that returns views of its first operand."""
    return _FORMULAS.get(func)


def _dimension(dim: int, rank: int) -> int | None:
    return dim % rank if -rank <= dim < rank else None


def _viewed(base: TensorMeta, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Sequence[Place] | None:
    shape, numel = list(args[1]), base.numel
    if numel == 0 or any(type(n) is not int for n in shape):
        return None
    if shape.count(-1) == 1:
        rest = -math.prod(shape)
        if rest <= 0 or numel % rest:
            return None
        shape[shape.index(-1)] = numel // rest
    if math.prod(shape) != numel or any(n < 1 for n in shape):
        return None
    stride = contiguous_strides(base.shape)
    found = contiguous_strides(tuple(shape)) if stride == base.stride else _strides_of_view(base, shape)
    return None if found is None else ((tuple(shape), found, base.offset),)


def _strides_of_view(base: TensorMeta, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of a view of another shape; None if only a copy could have it.

    Dimensions of the base that lie in memory as one are taken together; each such chunk is divided among dimensions of the
    view. See `torch.Tensor.view` in PyTorch's documentation.
    """
    found = [0] * len(shape)
    at = len(shape) - 1
    step = base.stride[-1] if base.stride else 1
    inside = viewed = 1
    for d in range(len(base.shape) - 1, -1, -1):
        inside *= base.shape[d]
        if d and (base.shape[d - 1] == 1 or base.stride[d - 1] == inside * step):
            continue
        while at >= 0 and (viewed < inside or shape[at] == 1):
            found[at] = viewed * step
            viewed *= shape[at]
            at -= 1
        if viewed != inside:
            return None
        if d:
            step = base.stride[d - 1]
            inside = viewed = 1
    return tuple(found) if at < 0 else None


def _expanded(base: TensorMeta, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Sequence[Place] | None:
    shape = list(args[1])
    more = len(shape) - len(base.shape)
    if more < 0:
        return None
    stride = [0] * len(shape)
    if not base.shape:
        return ((tuple(shape), tuple(stride), base.offset),) if min(shape, default=0) >= 0 else None
    for d in range(len(shape) - 1, -1, -1):
        before = base.shape[d - more] if d >= more else 1
        if shape[d] == -1 and d >= more:
            shape[d] = before
        if shape[d] < 0 or before not in {1, shape[d]}:
            return None
        if before == shape[d] and d >= more:
            stride[d] = base.stride[d - more]
        elif d < more:
            # New dimensions step over all that is inside of them where they are not expanded.
            stride[d] = 0 if shape[d] != 1 else (shape[d + 1] * stride[d + 1] if d + 1 < len(shape) else 1)
    if math.prod(shape) > LARGEST:
        return None
    return ((tuple(shape), tuple(stride), base.offset),)


def _permuted(base: TensorMeta, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Sequence[Place] | None:
    rank = len(base.shape)
    dims = [_dimension(d, rank) for d in args[1]]
    if len(dims) != rank or {*dims} != {*range(rank)}:
        return None
    return ((tuple([base.shape[d] for d in dims if d is not None]), tuple([base.stride[d] for d in dims if d is not None]), base.offset),)  # fmt: skip


def _transposed(base: TensorMeta, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Sequence[Place] | None:
    rank = len(base.shape)
    first, second = _dimension(args[1], rank or 1), _dimension(args[2], rank or 1)
    if first is None or second is None or not rank:
        return None
    shape, stride = list(base.shape), list(base.stride)
    shape[first], shape[second] = shape[second], shape[first]
    stride[first], stride[second] = stride[second], stride[first]
    return ((tuple(shape), tuple(stride), base.offset),)


def _matrix_transposed(base: TensorMeta, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Sequence[Place] | None:
    if len(base.shape) > 2:
        return None
    return ((base.shape[::-1], base.stride[::-1], base.offset),)


def _unsqueezed(base: TensorMeta, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Sequence[Place] | None:
    rank = len(base.shape)
    dim = _dimension(args[1], rank + 1)
    if dim is None:
        return None
    step = base.shape[dim] * base.stride[dim] if dim < rank else 1
    shape = (*base.shape[:dim], 1, *base.shape[dim:])
    return ((shape, (*base.stride[:dim], step, *base.stride[dim:]), base.offset),)


def _squeezed(base: TensorMeta, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Sequence[Place] | None:
    rank = len(base.shape)
    wanted = args[1] if isinstance(args[1], (list, tuple)) else (args[1],)
    dims = {_dimension(d, rank or 1) for d in wanted}
    if None in dims:
        return None
    kept = [d for d in range(rank) if d not in dims or base.shape[d] != 1]
    return ((tuple([base.shape[d] for d in kept]), tuple([base.stride[d] for d in kept]), base.offset),)


def _selected(base: TensorMeta, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Sequence[Place] | None:
    dim, index = _dimension(args[1], len(base.shape)) if base.shape else None, args[2]
    if dim is None or not -base.shape[dim] <= index < base.shape[dim]:
        return None
    offset = base.offset + index % base.shape[dim] * base.stride[dim]
    return ((base.shape[:dim] + base.shape[dim + 1 :], base.stride[:dim] + base.stride[dim + 1 :], offset),)


def _sliced(base: TensorMeta, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Place] | None:
    if kwargs:
        return None
    given: list[Any] = [*args[1:], *[0, None, None, 1][len(args) - 1 :]]
    dim = _dimension(given[0], len(base.shape)) if base.shape else None
    start, end, step = given[1:]
    if dim is None or step < 1:
        return None
    first, last, step = slice(start, end, step).indices(base.shape[dim])
    shape, stride = list(base.shape), list(base.stride)
    offset = base.offset + first * stride[dim]
    shape[dim] = len(range(first, last, step))
    stride[dim] *= step
    return ((tuple(shape), tuple(stride), offset),)


def _split(base: TensorMeta, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Place] | None:
    dim = _dimension(args[2] if len(args) > 2 else kwargs.get("dim", 0), len(base.shape)) if base.shape else None
    if dim is None:
        return None
    size, whole = args[1], base.shape[dim]
    if not isinstance(size, int):
        return _parts(base, dim, size) if sum(size) == whole and min(size, default=0) >= 0 else None
    if size < 1 or not whole:
        return None
    return _parts(base, dim, [min(size, whole - first) for first in range(0, whole, size)])


def _parts(base: TensorMeta, dim: int, sizes: Sequence[int]) -> Sequence[Place]:
    places: list[Place] = []
    offset = base.offset
    for size in sizes:
        places.append(((*base.shape[:dim], size, *base.shape[dim + 1 :]), base.stride, offset))
        offset += size * base.stride[dim]
    return places


def _unbound(base: TensorMeta, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Place] | None:
    dim = _dimension(args[1] if len(args) > 1 else kwargs.get("dim", 0), len(base.shape)) if base.shape else None
    if dim is None:
        return None
    shape, stride = base.shape[:dim] + base.shape[dim + 1 :], base.stride[:dim] + base.stride[dim + 1 :]
    return [(shape, stride, base.offset + n * base.stride[dim]) for n in range(base.shape[dim])]


def _as_it_is(base: TensorMeta, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Sequence[Place]:
    return ((base.shape, base.stride, base.offset),)


_FORMULAS: Final[Mapping[Any, Formula]] = {
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
    aten.expand.default: _expanded,
    aten.permute.default: _permuted,
    aten.transpose.int: _transposed,
    aten.t.default: _matrix_transposed,
    aten.unsqueeze.default: _unsqueezed,
    aten.squeeze.dim: _squeezed,
    aten.squeeze.dims: _squeezed,
    aten.select.int: _selected,
    aten.slice.Tensor: _sliced,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbound,
    aten.detach.default: _as_it_is,
    aten.alias.default: _as_it_is,
}
