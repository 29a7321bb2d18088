"""Ops whose result metadata does not depend on their float arguments.

Optimizers and schedules pass another number to them in every step: a learning rate, a bias correction. A call that was
inferred with one float is valid for all floats that every floating dtype can hold; otherwise each step would infer its result
again, and cache it. Kernels may refuse others, and calls with them are kept by the number (`scalar_ranges.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from djinn_client.interception.shape_inference.scalar_ranges import LEAST_MAXIMUM
from djinn_core.ir.operators import split_name

_PACKETS: Final = frozenset({
    "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "pow", "pow_", "lerp", "lerp_", "addcmul", "addcmul_",
    "addcdiv", "addcdiv_", "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "eq", "ne",
    "lt", "le", "gt", "ge", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_",
    "_foreach_add", "_foreach_add_", "_foreach_sub", "_foreach_sub_", "_foreach_mul", "_foreach_mul_", "_foreach_div", "_foreach_div_",
    "_foreach_pow", "_foreach_pow_", "_foreach_lerp", "_foreach_lerp_", "_foreach_addcmul", "_foreach_addcmul_",
    "_foreach_addcdiv", "_foreach_addcdiv_", "_foreach_clamp_min", "_foreach_clamp_min_", "_foreach_clamp_max",
    "_foreach_clamp_max_", "_foreach_maximum", "_foreach_maximum_", "_foreach_minimum", "_foreach_minimum_",
})  # fmt: skip


@cache
def infers_for_any_float(func: Any) -> bool:
    """True if `func` is such an op."""
    return split_name(func.name())[0] in _PACKETS


def without_floats(key: list[Any]) -> tuple[Any, ...]:
    """The key of a call without the values of its floats but those that some dtype cannot hold; that they are floats stays."""
    kept: list[Any] = []
    number_follows = False
    for part in key:
        if not number_follows or (type(part) is float and not -LEAST_MAXIMUM <= part <= LEAST_MAXIMUM):
            kept.append(part)
        number_follows = part is float and not number_follows
    return tuple(kept)
