"""Result metadata of factories with new sizes, without a meta kernel.

`djinn_native/csrc/formulas.cpp` does this for ops with operands.

Factories that differ only in sizes return tensors of equal dtype and device. An earlier call therefore gives all
metadata except the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from djinn_client.interception.shape_inference.inference_cache import inference_cache, keep
from djinn_client.interception.shape_inference.scalar_ranges import rule_of_call
from djinn_core.ir.program import Call, Signature, Slot
from djinn_core.ir.values import contiguous_strides, tensor_meta

Shape = tuple[int, ...]
KINDS_LIMIT: Final = 16384  # cached kinds of calls
LARGEST: Final = (
    1 << 60
)  # number of elements; above it PyTorch's own arithmetic overflows, and the user must get PyTorch's error
_SIZES: Final = frozenset({int})
aten = torch.ops.aten


def _of_size(args: Sequence[Any]) -> Shape | None:
    size = tuple(args[0])
    return size if all(type(n) is int and n >= 0 for n in size) else None


def _row_major(args: Sequence[Any]) -> Shape | None:
    size = tuple(args[0])
    return size if 0 not in size and tuple(args[1]) == contiguous_strides(size) else None


def _range(args: Sequence[Any]) -> Shape | None:
    start, end, step = (*args, 1)[:3]
    if any(type(n) is not int for n in args) or not step or (end - start) * step < 0:
        return None
    return (-(-(end - start) // step),)


_FORMULAS: Final[Mapping[int, Callable[[Sequence[Any]], Shape | None]]] = {  # by id: hashing an op runs Python code
    **dict.fromkeys(
        map(id, (aten.empty.memory_format, aten.zeros.default, aten.ones.default, aten.full.default)), _of_size
    ),
    id(aten.empty_strided.default): _row_major,
    id(aten.arange.start_step): _range,
}


def has_formula(func: Any) -> bool:
    """Return True if `func` is a factory with a formula."""
    return id(func) in _FORMULAS


def infer_by_formula(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], key: Sequence[Any], slots: tuple[Slot, ...]
) -> Call | None:
    """Return the inferred call of a factory. Return None if the meta kernel must run.

    `key`: the cache key of the call.
    """
    example: Call | None = inference_cache.kinds.get(_kind_key(key))
    shape = _FORMULAS[id(func)](args)
    if example is None or shape is None or math.prod([n for n in shape if n]) > LARGEST:
        return None
    scalars, (before,) = rule_of_call(func, example), example.results
    if before is None or len(before.shape) != len(shape) or (scalars is not None and not scalars.holds(args, kwargs)):
        return None
    meta = tensor_meta(shape, contiguous_strides(shape), 0, before.dtype, before.device)
    return example.of_other_sizes((), (meta,), (meta.nbytes,), slots)


def learn(key: Sequence[Any], call: Call) -> None:
    """Keep an inferred call of a factory as the example for its kind."""
    (result,) = call.results
    if result is not None and result.stride == contiguous_strides(result.shape):
        keep(inference_cache.kinds, _kind_key(key), call, KINDS_LIMIT)


def forget_examples(signature: Signature | None = None) -> None:
    """Drop the examples of this signature, or all examples."""
    for key, example in list(inference_cache.kinds.items()):
        if signature is None or example.signature is signature:
            inference_cache.kinds.pop(key, None)


def _kind_key(key: Sequence[Any]) -> tuple[Any, ...]:
    """Return a cache key without sizes: all integers count as equal."""
    return (key[0], *[int if type(part) in _SIZES else part for part in key[1:]])
