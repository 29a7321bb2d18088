"""Shape formulas: result metadata of calls with new sizes, computed without a meta kernel.

Running a meta kernel takes several times as long as all else that the client does for an op, and programs whose batches
or sequences vary in length would run one for each op. Calls that differ in sizes and scalars alone (see `TensorClass`) have
results of the same dtypes, aliases and order of dimensions in memory, so an earlier call tells all but the sizes. These
follow from a formula of the op. The first result of a formula for each kind of call is compared with the meta kernel's; from
then on it is trusted, or not used any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from djinn_client.interception.bounded_memo import keep
from djinn_client.interception.shape_inference.inference_cache import inference_cache
from djinn_client.interception.shape_inference.meta_infer import order_of
from djinn_client.interception.shape_inference.scalar_ranges import ScalarRule, rule_of_call
from djinn_client.interception.shape_inference.shape_formulas import Formula as ShapeFormula
from djinn_client.interception.shape_inference.shape_formulas import (
    Shapes,
    is_pointwise,
    shape_formula,
    shape_of_pointwise,
)
from djinn_client.interception.shape_inference.view_formulas import Formula as ViewFormula
from djinn_client.interception.shape_inference.view_formulas import Place, view_formula
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.ir.program import Call, Signature, Slot
from djinn_core.ir.values import TensorMeta, contiguous_strides, tensor_meta
from djinn_core.logs import get_logger

log = get_logger("djinn.interception")

Key = tuple[Any, ...]
Results = tuple[TensorMeta | None, ...]
KINDS_LIMIT: Final = 16384  # remembered kinds of calls
LARGEST: Final = 1 << 60  # bytes of a result; beyond that PyTorch's own arithmetic overflows, and it says so
_NUMBERS: Final = frozenset({int, float})


class _Layout(msgspec.Struct, frozen=True):
    """Memory layout of a result, independent of its sizes.

    It is dense, with its dimensions in `order` (None: row-major); or has the strides of the first operand (`as_first`), also in
    dimensions of size 1, where no order tells them.
    """

    dtype: torch.dtype
    device: int
    small: tuple[int, ...]
    order: tuple[int, ...] | None
    as_first: bool = False

    def of_shape(self, shape: tuple[int, ...], first: TensorMeta | None) -> TensorMeta | None:
        """The result of this shape; None if its layout is not known because other sizes are 0 or 1 than before."""
        if tuple([n if n < 2 else -1 for n in shape]) != self.small:
            return None
        if 0 in self.small and math.prod([n for n in shape if n]) > LARGEST:
            return None  # no bytes, and strides beyond 64 bits
        if self.as_first:
            if first is None or first.shape != shape:
                return None
            stride = first.stride
        elif self.order is None:
            stride = contiguous_strides(shape)
        else:
            steps = contiguous_strides(tuple([shape[d] for d in self.order]))
            by_dimension = dict(zip(self.order, steps, strict=True))
            stride = tuple([by_dimension[d] for d in range(len(shape))])
        return tensor_meta(shape, stride, 0, self.dtype, self.device)


class KindOfCalls(msgspec.Struct, eq=False):
    """Calls that differ in sizes and scalars only.

    Attributes:
        example: one that the meta kernel was run for. layouts: of its new results; None for all others.
        formula: of the shapes of the results. view: in its place, where the results look into the first operand. Neither as long as
            the example is the only one.
        trusted: whether the formula was right once.
        scalars: ranges of the scalars that need no closer look.
        numbers_in_tensors: whether a number comes in the shape of a CPU tensor.
        wrong: whether the formula disagreed with the meta kernel, or there is none.
    """

    example: Call
    layouts: tuple[_Layout | None, ...] = ()
    formula: ShapeFormula | None = None
    view: ViewFormula | None = None
    scalars: ScalarRule | None = None
    numbers_in_tensors: bool = False
    trusted: bool = False
    wrong: bool = False

    def results(self, args: Sequence[Any], kwargs: Mapping[str, Any], metas: Sequence[TensorMeta]) -> Results:
        """The results for operands of these sizes; nothing where the formula does not cover them."""
        if self.view is not None:
            return self._views(self.view(metas[0], args, kwargs), metas[0])
        assert self.formula is not None
        made = self.formula([meta.shape for meta in metas], args, kwargs)
        if made is None or len(made) != len(self.layouts):
            return ()
        found: list[TensorMeta | None] = []
        for shape, layout, same, before in zip(
            made, self.layouts, self.example.inplace, self.example.results, strict=True
        ):
            meta = None
            if same >= 0:
                meta = metas[same]
                if meta.shape != shape:
                    return ()
            elif layout is not None:
                meta = layout.of_shape(shape, metas[0] if metas else None)
                if meta is None:
                    return ()
            elif before is not None:
                return ()
            found.append(meta)
        return tuple(found)

    def _views(self, places: Sequence[Place] | None, base: TensorMeta) -> Results:
        before = self.example.results
        if places is None or len(places) != len(before):
            return ()
        if any(m is None or len(m.shape) != len(shape) for m, (shape, _, _) in zip(before, places, strict=True)):
            return ()  # a dimension is squeezed where it was not before
        if 0 in base.shape and any(max(map(abs, (*stride, offset))) > LARGEST for _, stride, offset in places):
            return ()  # sizes that do not count beside 0 can be of any size, and strides beyond 64 bits
        return tuple([
            tensor_meta(shape, stride, offset, base.dtype, base.device) for shape, stride, offset in places
        ])  # fmt: skip


def infer_by_formula(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    key: Sequence[Any],
    operands: Sequence[LazyTensor],
    slots: tuple[Slot, ...],
) -> Call | None:
    """Infer the call with these arguments by formula; None if the meta kernel must be run.

    `key` is the cache key of the call, `operands` are the tensors among the arguments, `slots` the scalars.
    """
    if kwargs.get("generator") is not None:
        return None
    kind = inference_cache.kinds.get(_kind_key(key))
    if kind is None or not kind.trusted or (kind.scalars is not None and not kind.scalars.holds(args, kwargs)):
        return None
    metas = tuple([operand.remote.meta for operand in operands])
    results = kind.results(args, kwargs, metas)
    if not results:
        return None
    if kind.view is not None:
        nbytes: tuple[int, ...] = (0,) * len(results)
    else:
        nbytes = tuple([
            0 if layout is None or meta is None else meta.nbytes
            for meta, layout in zip(results, kind.layouts, strict=True)
        ])  # fmt: skip
        if max(nbytes) > LARGEST:
            return None
    return kind.example.of_other_sizes(metas, results, nbytes, None if kind.numbers_in_tensors else slots)


def learn(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    key: Sequence[Any],
    call: Call,
    *,
    numbers_in_tensors: bool,
) -> None:
    """Keep `call`, which was inferred, as an example of its kind; or compare the formula's result with it."""
    if not has_formula(func) or kwargs.get("generator") is not None or call.changes or not call.results:
        return
    kind_key = _kind_key(key)
    kind = inference_cache.kinds.get(kind_key)
    if kind is None:  # most kinds come once
        keep(inference_cache.kinds, kind_key, KindOfCalls(call), KINDS_LIMIT)
        return
    if kind.formula is None and kind.view is None and not kind.wrong:
        kind = _kind(func, kind.example, numbers_in_tensors=numbers_in_tensors)
        inference_cache.kinds[kind_key] = kind
    if kind.trusted or kind.wrong:
        return
    results = kind.results(args, kwargs, call.operands)
    if not results:
        return
    kind.trusted = results == call.results and call.signature is kind.example.signature
    kind.wrong = not kind.trusted
    if kind.wrong:
        log.debug("a formula differs from the meta kernel", op=call.op, formula=results, kernel=call.results)


def forget_examples(signature: Signature | None = None) -> None:
    """Drop cached results of calls of this signature; of all signatures where none is given."""
    kinds = inference_cache.kinds
    if signature is None:
        kinds.clear()
        return
    for key, kind in list(kinds.items()):
        if kind.example.signature is signature:
            kinds.pop(key, None)


def has_formula(func: Any) -> bool:
    """True if the shapes of the results of `func` can be computed without its meta kernel."""
    known = _known.get(id(func))
    if known is None:
        known = view_formula(func) is not None or shape_formula(func) is not None or is_pointwise(func)
        _known[id(func)] = known
    return known


_known: dict[int, bool] = {}  # by id, because the hash of an op is a function in Python


def _pointwise(shapes: Sequence[tuple[int, ...]], _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Shapes | None:
    return shape_of_pointwise(shapes)


def _kind(func: Any, call: Call, *, numbers_in_tensors: bool) -> KindOfCalls:
    """Make the kind of an inferred call: facts that hold for all calls that differ in sizes and scalars only."""
    metas = [*call.operands, *call.results]
    if any(m is not None and (m.conj or m.neg) for m in metas):
        return KindOfCalls(call, wrong=True)
    views = bool(call.aliases) and all(a == 0 for a in call.aliases) and all(same < 0 for same in call.inplace)
    if views:
        usual = all(m is not None and m.dtype is call.operands[0].dtype for m in call.results)
        view = view_formula(func)
        wrong = view is None or not usual
        return KindOfCalls(call, (None,) * len(call.results), view=view, wrong=wrong)
    layouts: list[_Layout | None] = []
    for meta, alias, same, nbytes in call.outcome:
        if meta is None or same >= 0:
            layouts.append(None)
            continue
        order = order_of(meta.shape, meta.stride)
        first = call.operands[0] if call.operands else meta
        as_first = order is None and (first.shape, first.stride) == (meta.shape, meta.stride)
        if alias >= 0 or meta.offset or (order is None and not as_first) or nbytes != meta.nbytes:
            return KindOfCalls(call, wrong=True)
        row_major = meta.stride == contiguous_strides(meta.shape)
        small = tuple([n if n < 2 else -1 for n in meta.shape])
        layouts.append(_Layout(meta.dtype, meta.device, small, None if row_major else order, as_first))
    formula = shape_formula(func) or _pointwise
    return KindOfCalls(
        call, tuple(layouts), formula, scalars=rule_of_call(func, call), numbers_in_tensors=numbers_in_tensors
    )


def _kind_key(key: Sequence[Any]) -> Key:
    """All that counts of a call but sizes and scalars, from the key that it is remembered by.

    That has the metadata of tensors, numbers as they are, and a mark for the length of each list.
    """
    parts = [
        part.tensor_class if type(part) is TensorMeta else type(part) if type(part) in _NUMBERS else part
        for part in key
    ]
    parts[0] = key[0]  # which op it is
    return tuple(parts)
