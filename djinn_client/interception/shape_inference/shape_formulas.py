"""Shapes of the results of ops that make or write dense tensors, from the shapes of their operands and their scalars.

A formula takes the shapes of all operands, in order, and the arguments. It returns a shape for each result, or None if
the arguments do not fit or need a closer look: the meta kernel is then run, and raises the error. The source of a formula is
PyTorch's own tests and documentation of the op; `tests/interception/test_formulas.py` compares each with the meta
kernel over random sizes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from djinn_core import torch_private
from djinn_core.ir.values import contiguous_strides

Shape = tuple[int, ...]
Shapes = Sequence[Shape]
Formula = Callable[[Shapes, Sequence[Any], Mapping[str, Any]], Shapes | None]

aten = torch.ops.aten


def shape_formula(func: Any) -> Formula | None:
    """The formula of an op; None if it has none, as pointwise ops, which share `shape_of_pointwise`."""
    return _FORMULAS.get(func)


@functools.cache
def is_pointwise(func: Any) -> bool:
    """True if `func` computes each element from those in its place, and returns or writes one tensor."""
    schema = torch_private.schema_of(func)
    returned, taken = schema.returns, schema.arguments
    if torch.Tag.pointwise not in func.tags or len(returned) != 1 or str(returned[0].type) != "Tensor":
        return False
    written = [a for a in taken if a.alias_info is not None]
    if returned[0].alias_info is None:
        return not written
    return written == taken[:1] and bool(written[0].alias_info.is_write)


def broadcast(shapes: Shapes) -> Shape | None:
    """The shape that these have together; None if they do not fit."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    rank = max(map(len, shapes))
    made = [1] * rank
    for shape in shapes:
        at = rank - len(shape)
        for size in shape:
            if size != 1:
                if made[at] not in {1, size}:
                    return None
                made[at] = size
            at += 1
    return tuple(made)


def shape_of_pointwise(shapes: Shapes) -> Shapes | None:
    """The shape of the result of an op that computes each element from those in its place."""
    made = broadcast(shapes) if shapes else None
    return None if made is None else (made,)


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str, default: Any = None) -> Any:
    return args[position] if position < len(args) else kwargs.get(name, default)


def _dimension(dim: Any, rank: int) -> int | None:
    most = max(rank, 1)
    return dim % most if isinstance(dim, int) and -most <= dim < most else None


# --- as an operand ----------------------------------------------------------------------------------------------


def _as_first(shapes: Shapes, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes:
    return (shapes[0],)


def _flipped(shapes: Shapes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
    dims = _argument(args, kwargs, 1, "dims")
    most = len(shapes[0])
    if len({d % max(most, 1) for d in dims}) < len(dims) or not all(-most <= d < most for d in dims):
        return None
    return (shapes[0],)


def _twice_as_first(shapes: Shapes, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes:
    return (shapes[0], shapes[0])


def _as_second(shapes: Shapes, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes:
    return (shapes[1],)


def _along_dimension(shapes: Shapes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
    dim = _dimension(_argument(args, kwargs, 1, "dim"), len(shapes[0]))
    return None if dim is None else (shapes[0],)


def _gradient_along_dimension(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    dim = _dimension(args[2], len(shapes[0]))
    return (shapes[0],) if dim is not None and shapes[0] == shapes[1] else None


def _copied_into(shapes: Shapes, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    return (shapes[0],) if broadcast(shapes) == shapes[0] else None


def _of_size(position: int) -> Formula:
    """The shape is an argument."""

    def formula(_shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
        size = tuple(args[position])
        return (size,) if all(type(n) is int and n >= 0 for n in size) else None

    return formula


# --- products -----------------------------------------------------------------------------------------------------

_MATRIX: Final = 2
_BATCH_OF_MATRICES: Final = 3


def _mm(shapes: Shapes, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    left, right = shapes
    if len(left) != _MATRIX or len(right) != _MATRIX or left[1] != right[0]:
        return None
    return ((left[0], right[1]),)


def _bmm(shapes: Shapes, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    left, right = shapes
    if len(left) != _BATCH_OF_MATRICES or len(right) != _BATCH_OF_MATRICES:
        return None
    return ((left[0], left[1], right[2]),) if left[0] == right[0] and left[2] == right[1] else None


def _added(product: Formula) -> Formula:
    """A product to which the first operand is added."""

    def formula(shapes: Shapes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
        made = product(shapes[1:], args, kwargs)
        return made if made is not None and broadcast((shapes[0], made[0])) == made[0] else None

    return formula


def _linear(shapes: Shapes, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    given, weight, *bias = shapes
    if not given or len(weight) != _MATRIX or given[-1] != weight[1] or any(b != weight[:1] for b in bias):
        return None
    return ((*given[:-1], weight[0]),)


def _matmul(shapes: Shapes, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    left, right = shapes
    if len(left) < _MATRIX or len(right) < _MATRIX or left[-1] != right[-2]:
        return None
    batch = broadcast((left[:-2], right[:-2]))
    return None if batch is None else ((*batch, left[-2], right[-1]),)


# --- attention ----------------------------------------------------------------------------------------------------

_HEADS: Final = 4  # batch, heads, length, width


def _attention_fits(query: Shape, key: Shape, value: Shape, *, grouped: bool = False) -> bool:
    """`grouped`: several heads of the query may share one of the keys."""
    if not len(query) == len(key) == len(value) == _HEADS or key[:3] != value[:3]:
        return False
    heads = query[1] == key[1] or (grouped and key[1] > 0 and query[1] % key[1] == 0)
    return heads and query[0] == key[0] and query[3] == key[3]


def _attention(shapes: Shapes, _args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
    query, key, value, *masks = shapes
    if not _attention_fits(query, key, value, grouped=bool(kwargs.get("enable_gqa"))):
        return None
    weights = (*query[:3], key[2])
    if any(broadcast((mask, weights)) != weights for mask in masks):
        return None
    return ((*query[:3], value[3]),)


def _attention_on_cpu(shapes: Shapes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
    """The result, and the logarithm of the sum of each row's exponentials."""
    made = _attention(shapes, args, kwargs)
    query = shapes[0]
    return None if made is None else (made[0], query[:3])


def _attention_backward_on_cpu(shapes: Shapes, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    gradient, query, key, value = shapes[:4]
    if not _attention_fits(query, key, value) or gradient != (*query[:3], value[3]):
        return None
    return (query, key, value)


# --- normalisation and dropout --------------------------------------------------------------------------------------


def _normalised(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    """Layer and RMS normalisation, whole."""
    over = tuple(args[1])
    fits = over and shapes[0][-len(over) :] == over and all(weight == over for weight in shapes[1:])
    return (shapes[0],) if fits else None


def _layer_norm(statistics: int) -> Formula:
    """Layer or RMS normalisation with `statistics` tensors of statistics for its backward."""

    def formula(shapes: Shapes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
        if _normalised(shapes, args, kwargs) is None:
            return None
        over, given = len(args[1]), shapes[0]
        return (given, *[(*given[: len(given) - over], *(1,) * over)] * statistics)

    return formula


def _layer_norm_backward(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    over = tuple(args[2])
    given = shapes[1]
    return (given, over, over) if shapes[0] == given and given[-len(over) :] == over else None


def _batch_norm(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    given = shapes[0]
    if len(given) < _MATRIX or any(shape != given[1:2] for shape in shapes[1:]):
        return None
    statistics = given[1:2] if args[5] else (0,)
    return (given, statistics, statistics)


def _batch_norm_backward(shapes: Shapes, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    given = shapes[1]
    return (given, given[1:2], given[1:2]) if len(given) >= _MATRIX and shapes[0] == given else None


def _group_norm(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    batch, channels, elements, groups = args[3:7]
    given = shapes[0]
    if given[:2] != (batch, channels) or math.prod(given[2:]) != elements or any(s != (channels,) for s in shapes[1:]):
        return None
    return (given, (batch, groups), (batch, groups))


def _group_norm_backward(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    batch, channels, elements = args[5:8]
    gradient, given = shapes[:2]
    if gradient != given or given[:2] != (batch, channels) or math.prod(given[2:]) != elements:
        return None
    return (given, (channels,), (channels,))


# --- reductions ---------------------------------------------------------------------------------------------------


def _of_everything(_shapes: Shapes, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes:
    return ((),)


def _reduced(shape: Shape, dims: Any, keep: bool) -> Shape | None:
    if dims is None:
        dims = ()
    over = {_dimension(d, len(shape)) for d in ((dims,) if isinstance(dims, int) else dims)}
    if None in over:
        return None
    if not over:
        over = set(range(len(shape)))
    if keep:
        return tuple([1 if d in over else n for d, n in enumerate(shape)])
    return tuple([n for d, n in enumerate(shape) if d not in over])


def _reduction(dims: int, keep: int, results: int = 1, names: tuple[str, str] = ("dim", "keepdim")) -> Formula:
    """A reduction whose dimensions, and whether they are kept, are the arguments at these positions."""

    def formula(shapes: Shapes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
        if 0 in shapes[0]:
            return None  # some refuse that, some do not
        over = _argument(args, kwargs, dims, names[0])
        made = _reduced(shapes[0], over, bool(_argument(args, kwargs, keep, names[1], default=False)))
        return None if made is None else (made,) * results

    return formula


def _topk(shapes: Shapes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
    given, count = shapes[0], args[1]
    dim = _dimension(_argument(args, kwargs, 2, "dim", -1), len(given))
    if dim is None or not given or not 0 <= count <= given[dim]:
        return None
    made = (*given[:dim], count, *given[dim + 1 :])
    return (made, made)


def _sorted(shapes: Shapes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
    dim = _dimension(_argument(args, kwargs, 1, "dim", -1), len(shapes[0]))
    return None if dim is None else (shapes[0], shapes[0])


# --- parts of tensors and tensors of parts ----------------------------------------------------------------------------


def _concatenated(shapes: Shapes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
    first = shapes[0]
    dim = _dimension(_argument(args, kwargs, 1, "dim", 0), len(first))
    if dim is None or not first or any(len(shape) != len(first) for shape in shapes):
        return None
    if any(shape[:dim] != first[:dim] or shape[dim + 1 :] != first[dim + 1 :] for shape in shapes):
        return None
    return ((*first[:dim], sum([shape[dim] for shape in shapes]), *first[dim + 1 :]),)


def _stacked(shapes: Shapes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
    first = shapes[0]
    dim = _dimension(_argument(args, kwargs, 1, "dim", 0), len(first) + 1)
    if dim is None or any(shape != first for shape in shapes):
        return None
    return ((*first[:dim], len(shapes), *first[dim:]),)


def _embedded(shapes: Shapes, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    weight, indices = shapes
    return ((*indices, *weight[1:]),) if len(weight) == _MATRIX else None


def _embedding_backward(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    gradient, indices = shapes
    return ((args[2], gradient[-1]),) if gradient and gradient[:-1] == indices else None


def _gathered(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    given, index = shapes
    dim = _dimension(args[1], len(given))
    if dim is None or len(given) != len(index):
        return None
    return (index,) if all(i <= n for d, (n, i) in enumerate(zip(given, index, strict=True)) if d != dim) else None


def _scattered(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    given, index, *sources = shapes
    dim = _dimension(args[1], len(given))
    if dim is None or any(len(shape) != len(given) for shape in (index, *sources)):
        return None
    fits = all(i <= n for d, (n, i) in enumerate(zip(given, index, strict=True)) if d != dim)
    covered = all(i <= n for source in sources for i, n in zip(index, source, strict=True))
    return (given,) if fits and covered else None


def _selected_by_index(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    given, index = shapes
    dim = _dimension(args[1], len(given))
    if dim is None or not given or len(index) != 1:
        return None
    return ((*given[:dim], index[0], *given[dim + 1 :]),)


def _indexed(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    """Advanced indexing: dimensions of indices side by side are replaced in their place, others come first."""
    given, *indices = shapes
    places = [d for d, index in enumerate(args[1]) if index is not None]
    if len(args[1]) > len(given) or not places:
        return None
    if any(i is not None and i.dtype in {torch.bool, torch.uint8} for i in args[1]):
        return None
    made = broadcast(indices)
    if made is None or any(given[d] == 0 for d in places):
        return None
    rest = tuple([n for d, n in enumerate(given) if d not in places])
    first = places[0] if places[-1] - places[0] + 1 == len(places) else 0
    return ((*rest[:first], *made, *rest[first:]),)


def _index_put(shapes: Shapes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
    target = _indexed(shapes[:-1], args, kwargs)
    fits = target is not None and broadcast((target[0], shapes[-1])) == target[0]
    return (shapes[0],) if fits else None


def _padded(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    given, pad = shapes[0], args[1]
    if len(pad) % 2 or len(pad) > 2 * len(given):
        return None
    made = list(given)
    for number in range(len(pad) // 2):
        made[-1 - number] += pad[2 * number] + pad[2 * number + 1]
    return (tuple(made),) if all(n > 0 for n in made) else None


def _repeated(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    given, times = shapes[0], tuple(args[1])
    if len(times) < len(given) or any(n < 0 for n in times):
        return None
    whole = (*(1,) * (len(times) - len(given)), *given)
    return (tuple([n * count for n, count in zip(whole, times, strict=True)]),)


# --- convolutions, pools and images -----------------------------------------------------------------------------------


def _each(numbers: Sequence[int], count: int) -> Sequence[int] | None:
    """One number for each of `count` dimensions."""
    if len(numbers) == count:
        return numbers
    return list(numbers) * count if len(numbers) == 1 else None


def _convolution(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    given, weight = shapes[:2]
    stride, padding, dilation, transposed, output_padding, groups = args[3:9]
    space = len(given) - 2
    if space < 1 or len(weight) != len(given) or 0 in given or 0 in weight or groups < 1:
        return None
    numbers = [_each(n, space) for n in (stride, padding, dilation, output_padding)]
    if any(n is None for n in numbers) or any(n < 1 for n in (*stride, *dilation)) or any(n < 0 for n in padding):
        return None
    steps, pads, gaps, more = (n or [] for n in numbers)
    channels = weight[1] * groups if transposed else weight[0]
    if given[1] != (weight[0] if transposed else weight[1] * groups) or (shapes[2:] and shapes[2] != (channels,)):
        return None
    made: list[int] = []
    for d, size in enumerate(given[2:]):
        reach = gaps[d] * (weight[2 + d] - 1)
        if transposed:
            made.append((size - 1) * steps[d] - 2 * pads[d] + reach + more[d] + 1)
        else:
            made.append((size + 2 * pads[d] - reach - 1) // steps[d] + 1)
    return ((given[0], channels, *made),) if all(n > 0 for n in made) else None


def _convolution_backward(shapes: Shapes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
    gradient, given, weight = shapes[:3]
    made = _convolution((given, weight), (None, None, None, *args[4:10]), kwargs)
    if made is None or made[0] != gradient:
        return None
    return (given, weight, tuple(args[3] or ()))


def _pooled(size: int, kernel: int, stride: int, padding: int, dilation: int, *, ceil: bool) -> int:
    reach = dilation * (kernel - 1) + 1
    left = size + 2 * padding - reach
    count = -(-left // stride) + 1 if ceil else left // stride + 1
    # The last window has to begin inside of the input or of the padding on its left.
    return count - 1 if ceil and (count - 1) * stride >= size + padding else count


def _pool(space: int, *, dilated: bool, results: int) -> Formula:
    """Maxima (`dilated`) or means of windows over the last `space` dimensions."""

    def formula(shapes: Shapes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
        given = shapes[0]
        kernel = _each(args[1], space)
        stride = _each(_argument(args, kwargs, 2, "stride") or args[1], space)
        padding = _each(_argument(args, kwargs, 3, "padding", [0]), space)
        dilation = _each(_argument(args, kwargs, 4, "dilation", [1]) if dilated else [1], space)
        ceil = bool(_argument(args, kwargs, 5 if dilated else 4, "ceil_mode", default=False))
        if len(given) not in {space + 1, space + 2} or 0 in given or not (kernel and stride and padding and dilation):
            return None
        if any(n < 1 for n in (*kernel, *stride, *dilation)):
            return None
        if any(not 0 <= p <= k // 2 for p, k in zip(padding, kernel, strict=True)):
            return None
        sizes = zip(given[-space:], kernel, stride, padding, dilation, strict=True)
        made = [_pooled(*numbers, ceil=ceil) for numbers in sizes]
        return ((*given[:-space], *made),) * results if all(n > 0 for n in made) else None

    return formula


def _resized(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    """Pools and interpolations that are given the size of their result."""
    given, size = shapes[0], tuple(args[1])
    if len(given) - len(size) not in {1, 2} or 0 in given or any(n < 1 for n in size):
        return None
    return ((*given[: -len(size)], *size),)


def _resized_backward(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    size, before = tuple(args[1]), tuple(args[2])
    return (before,) if shapes[0] == (*before[: -len(size)], *size) else None


# --- losses -------------------------------------------------------------------------------------------------------


def _nll_loss(shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    given, target = shapes[:2]
    if len(given) != _MATRIX or target != given[:1] or any(weight != given[1:] for weight in shapes[2:]):
        return None
    return (() if args[3] else target, ())


def _nll_loss_backward(shapes: Shapes, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    given, target = shapes[1:3]
    return (given,) if len(given) == _MATRIX and target == given[:1] else None


def _loss(shapes: Shapes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
    """A pointwise loss, of each element or reduced to one number."""
    made = broadcast(shapes[:2])
    if made is None:
        return None
    return ((),) if _argument(args, kwargs, 2, "reduction", 1) else (made,)


def _loss_backward(shapes: Shapes, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    made = broadcast(shapes[1:3])
    return (made,) if made is not None and broadcast((shapes[0], made)) == made else None


# --- tensors of nothing -------------------------------------------------------------------------------------------


def _row_major(_shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    """A tensor of given size and strides, where these say that it is row-major."""
    size, stride = tuple(args[0]), tuple(args[1])
    return (size,) if 0 not in size and stride == contiguous_strides(size) else None


def _range(_shapes: Shapes, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    start, end, step = args
    if any(type(n) is not int for n in args) or not step or (end - start) * step < 0:
        return None
    return ((-(-(end - start) // step),),)


_FORMULAS: Final[Mapping[Any, Formula]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.addmm.default: _added(_mm),
    aten.baddbmm.default: _added(_bmm),
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.scaled_dot_product_attention.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_on_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward_on_cpu,
    aten._softmax.default: _along_dimension,
    aten._log_softmax.default: _along_dimension,
    aten._safe_softmax.default: _along_dimension,
    aten._softmax_backward_data.default: _gradient_along_dimension,
    aten._log_softmax_backward_data.default: _gradient_along_dimension,
    aten.cumsum.default: _along_dimension,
    aten.layer_norm.default: _normalised,
    aten.rms_norm.default: _normalised,
    aten.native_layer_norm.default: _layer_norm(2),
    aten._fused_rms_norm.default: _layer_norm(1),
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.native_dropout.default: _twice_as_first,
    aten.sum.default: _of_everything,
    aten.sum.dim_IntList: _reduction(1, 2),
    aten.mean.default: _of_everything,
    aten.mean.dim: _reduction(1, 2),
    aten.amax.default: _reduction(1, 2),
    aten.amin.default: _reduction(1, 2),
    aten.any.default: _of_everything,
    aten.any.dim: _reduction(1, 2),
    aten.all.default: _of_everything,
    aten.all.dim: _reduction(1, 2),
    aten.prod.dim_int: _reduction(1, 2),
    aten.argmax.default: _reduction(1, 2),
    aten.argmin.default: _reduction(1, 2),
    aten.max.dim: _reduction(1, 2, results=2),
    aten.min.dim: _reduction(1, 2, results=2),
    aten.logsumexp.default: _reduction(1, 2),
    aten.linalg_vector_norm.default: _reduction(2, 3),
    aten.std.correction: _reduction(1, 99),
    aten.var.correction: _reduction(1, 99),
    aten.topk.default: _topk,
    aten.sort.default: _sorted,
    aten.cat.default: _concatenated,
    aten.stack.default: _stacked,
    aten.embedding.default: _embedded,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.gather.default: _gathered,
    aten.scatter.src: _scattered,
    aten.scatter.value: _scattered,
    aten.scatter_add.default: _scattered,
    aten.index_select.default: _selected_by_index,
    aten.index.Tensor: _indexed,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten.slice_backward.default: _of_size(1),
    aten.select_backward.default: _of_size(1),
    aten.constant_pad_nd.default: _padded,
    aten.repeat.default: _repeated,
    aten.flip.default: _flipped,
    aten.tril.default: _as_first,
    aten.triu.default: _as_first,
    aten.isin.Tensor_Tensor: _as_first,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.max_pool2d_with_indices.default: _pool(2, dilated=True, results=2),
    aten.max_pool2d_with_indices_backward.default: _as_second,
    aten.avg_pool2d.default: _pool(2, dilated=False, results=1),
    aten.avg_pool2d_backward.default: _as_second,
    aten._adaptive_avg_pool2d.default: _resized,
    aten._adaptive_avg_pool2d_backward.default: _as_second,
    aten.upsample_nearest2d.default: _resized,
    aten.upsample_nearest2d_backward.default: _resized_backward,
    aten.upsample_bilinear2d.default: _resized,
    aten.upsample_bilinear2d_backward.default: _resized_backward,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.mse_loss.default: _loss,
    aten.mse_loss_backward.default: _loss_backward,
    aten.smooth_l1_loss.default: _loss,
    aten.smooth_l1_loss_backward.default: _loss_backward,
    aten.huber_loss.default: _loss,
    aten.huber_loss_backward.default: _loss_backward,
    aten.clone.default: _as_first,
    aten._to_copy.default: _as_first,
    aten.copy_.default: _copied_into,
    aten.fill_.Scalar: _as_first,
    aten.zero_.default: _as_first,
    aten.bernoulli_.float: _as_first,
    aten.normal_.default: _as_first,
    aten.uniform_.default: _as_first,
    aten.empty_like.default: _as_first,
    aten.zeros_like.default: _as_first,
    aten.ones_like.default: _as_first,
    aten.full_like.default: _as_first,
    aten.rand_like.default: _as_first,
    aten.randn_like.default: _as_first,
    aten.new_empty.default: _of_size(1),
    aten.new_zeros.default: _of_size(1),
    aten.new_ones.default: _of_size(1),
    aten.new_full.default: _of_size(1),
    aten.empty.memory_format: _of_size(0),
    aten.empty_strided.default: _row_major,
    aten.zeros.default: _of_size(0),
    aten.ones.default: _of_size(0),
    aten.full.default: _of_size(0),
    aten.rand.default: _of_size(0),
    aten.randn.default: _of_size(0),
    aten.arange.start_step: _range,
}
