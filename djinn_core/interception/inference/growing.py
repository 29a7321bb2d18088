"""What ops return for sizes that are new, where that follows from a call of the same signature.

A cache that grows by a token gives every step sizes that no step before had. Running meta kernels for them would cost more
than all else that the client does in a step. Operands of one signature differ in sizes alone, so dtypes, aliases and the
order of dimensions in memory are those of the earlier call; shapes follow from rules, for the few kinds of ops that
are given other sizes all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch

from djinn_core import torch_private
from djinn_core.interception.inference.infer import laid_out, order_of, signature_of
from djinn_core.interception.recording.encode import encode_form
from djinn_core.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.ir.program import Call
from djinn_core.ir.values import TensorMeta, contiguous_strides, tensor_meta

Arguments = Sequence[Any]
Metas = Sequence[TensorMeta]
# From the arguments, the operands' metadata and the earlier result to the new one; None where it takes a meta kernel.
Rule = Callable[[Arguments, Metas, TensorMeta], TensorMeta | None]

aten = torch.ops.aten


def foretell(func: Any, args: Arguments, kwargs: dict[str, Any], operands: Sequence[LazyTensor]) -> Call | None:
    """The call of `func` with these arguments; None where it takes a meta kernel to know.

    `operands` are the tensors among the arguments.
    """
    rule = _rule(func)
    if rule is None or not operands:
        return None
    metas = tuple([operand.remote.meta for operand in operands])
    if any(meta.conj or meta.neg for meta in metas):
        return None
    example = signature_of(encode_form(func, args, kwargs, (True,), sequence=False), metas).example
    if example is None:
        return None
    (before,) = example.results
    assert before is not None
    if before.device != metas[0].device:
        return None  # the example is of another logical device
    if rule is _pointwise and not _tell_dtype(args, before.dtype):
        return None
    result = rule((*args, *kwargs.values()), metas, before)
    if result is None:
        return None
    return attrs.evolve(example, operands=metas, results=(result,), nbytes=(result.nbytes,))


def learn_example(func: Any, call: Call) -> None:
    """Keep `call`, which was inferred, as an example of its signature."""
    if _rule(func) is None or call.writes or call.changes or call.new_count != 1 or len(call.results) != 1:
        return
    (result,) = call.results
    if result is not None and not (result.conj or result.neg):
        call.signature.example = call


def _tell_dtype(args: Arguments, before: torch.dtype) -> bool:
    """Whether the result is of dtype `before` again: a number bears on that beside tensors without a floating one only."""
    tensors = [a for a in args if isinstance(a, LazyTensor)]
    others = [a for a in args if not isinstance(a, LazyTensor)]
    if any(isinstance(a, torch.Tensor) for a in others):
        return False
    if any(tensor.is_floating_point() for tensor in tensors):
        return True
    if before.is_floating_point or before.is_complex:
        return False  # the program's default dtype, which it may change
    return all(type(a) is int for a in others) and all(t.dtype is not torch.bool for t in tensors)


def _rule(func: Any) -> Rule | None:
    known = _rules.get(func, _UNSEEN)
    if known is _UNSEEN:
        known = _rules[func] = _pointwise if _is_pointwise(func) else None
    rule: Rule | None = known
    return rule


def _is_pointwise(func: Any) -> bool:
    schema = torch_private.schema_of(func)
    returned = schema.returns
    return (
        torch.Tag.pointwise in func.tags
        and torch.Tag.nondeterministic_seeded not in func.tags
        and len(returned) == 1
        and str(returned[0].type) == "Tensor"
        and returned[0].alias_info is None
        and not any(a.alias_info is not None for a in schema.arguments)
        and all("Tensor" in str(a.type) or a.name in _HARMLESS for a in schema.arguments)
    )


_HARMLESS: Final = frozenset({"alpha", "approximate", "rounding_mode"})  # numbers and modes that choose no dtype


def _row_major(shape: tuple[int, ...], like: TensorMeta) -> TensorMeta:
    return tensor_meta(shape, contiguous_strides(shape), 0, like.dtype, like.device)


def _is_contiguous(meta: TensorMeta) -> bool:
    """As PyTorch says: strides of dimensions of size 1 do not matter."""
    wanted = contiguous_strides(meta.shape)
    return all(n == 1 or a == b for n, a, b in zip(meta.shape, meta.stride, wanted, strict=True))


def _pointwise(_args: Arguments, metas: Metas, before: TensorMeta) -> TensorMeta | None:
    """TensorIterator gives contiguous operands of one shape a contiguous result."""
    first = metas[0]
    if any(meta.shape != first.shape or not _is_contiguous(meta) for meta in metas) or 0 in first.shape:
        return None
    return _row_major(first.shape, before)


def _concatenated(args: Arguments, metas: Metas, before: TensorMeta) -> TensorMeta | None:
    shapes = [meta.shape for meta in metas]
    dim, rank = args[1] if len(args) > 1 else 0, len(shapes[0])
    if not -rank <= dim < rank or any(len(meta.shape) != rank or not _is_contiguous(meta) for meta in metas):
        return None
    dim %= rank
    if len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
        return None
    size = sum(shape[dim] for shape in shapes)
    return _row_major((*shapes[0][:dim], size, *shapes[0][dim + 1 :]), before)


def _attended(_args: Arguments, metas: Metas, before: TensorMeta) -> TensorMeta | None:
    query, key, value = (meta.shape for meta in metas[:3])
    if not (len(query) == 4 and query[:2] == key[:2] == value[:2] and query[3] == key[3] and key[2] == value[2]):
        return None
    for mask in metas[3:]:
        wanted, shape = (*query[:3], key[2]), (1,) * (4 - len(mask.shape)) + mask.shape
        if any(n not in {1, m} for n, m in zip(shape, wanted, strict=True)):
            return None
    order = order_of(before.shape, before.stride)
    meta = tensor_meta((*query[:3], value[3]), before.stride, 0, before.dtype, before.device)
    return laid_out(meta, order) if order is not None else None


def _sliced(args: Arguments, metas: Metas, _before: TensorMeta) -> TensorMeta | None:
    (given,) = metas
    bounds: list[Any] = [*args[1:], *[0, None, None, 1][len(args) - 1 :]]
    dim, start, end, step = bounds
    rank = len(given.shape)
    if not -rank <= dim < rank or step < 1:
        return None
    dim %= rank
    first, last, step = slice(start, end, step).indices(given.shape[dim])
    shape, stride = list(given.shape), list(given.stride)
    offset = given.offset + first * stride[dim]
    shape[dim] = len(range(first, last, step))
    stride[dim] *= step
    return tensor_meta(tuple(shape), tuple(stride), offset, given.dtype, given.device)


def _copied(args: Arguments, metas: Metas, _before: TensorMeta) -> TensorMeta | None:
    """Strides are kept, those of dimensions of size 1 too, unless the call says otherwise."""
    given = metas[0]
    if not _is_contiguous(given) or 0 in given.shape:
        return None
    if len(args) > 1 and args[1] is torch.contiguous_format:
        return _row_major(given.shape, given)
    if len(args) > 1 and args[1] is not torch.preserve_format:
        return None
    return tensor_meta(given.shape, given.stride, 0, given.dtype, given.device)


def _found(_args: Arguments, metas: Metas, before: TensorMeta) -> TensorMeta | None:
    given = metas[0]
    if not _is_contiguous(given) or 0 in given.shape:
        return None
    return _row_major(given.shape, before)


def _same(_args: Arguments, metas: Metas, _before: TensorMeta) -> TensorMeta:
    return metas[0]


_UNSEEN: Final = object()
_rules: dict[Any, Any] = {
    aten.cat.default: _concatenated,
    aten.scaled_dot_product_attention.default: _attended,
    aten.slice.Tensor: _sliced,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _copied,
    aten.isin.Tensor_Tensor: _found,
}
