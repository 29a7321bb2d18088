"""Ranges of scalars that every kernel of an op accepts, by the dtypes of the call.

Kernels convert scalars to their compute dtype, and refuse scalars that the dtype cannot hold. Some kernels refuse more.
Meta kernels check no scalars. A scalar within its range needs no further check. For any other scalar the CPU kernel is
tried (`trials.py`). A range may therefore be too narrow, but never too wide.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import msgspec
import torch

from djinn_core import torch_private
from djinn_core.ir.operators import split_name
from djinn_core.ir.program import Call

aten = torch.ops.aten

# Larger numbers overflow in float16, the smallest floating dtype in which most kernels compute.
LEAST_MAXIMUM: Final = torch.finfo(torch.float16).max
_FACTORS: Final = frozenset({"alpha", "beta"})  # range for integers only
_SMALLEST: Final = 5e-324  # the smallest positive float

# Ops that convert a scalar, and are not pointwise.
_CONVERTING: Final = frozenset(
    (
        "_unsafe_masked_index.default addbmm.default addbmm_.default addmm.default addmm_.default addmv.default addmv_.default "
        "addr.default addr_.default baddbmm.default baddbmm_.default constant_pad_nd.default fill_.Scalar full.default "
        "full_like.default hardtanh_.default histc.default index_add.default index_add_.default index_fill.int_Scalar "
        "index_fill_.int_Scalar linspace.default linspace.out linspace.Scalar_Tensor linspace.Tensor_Scalar multi_margin_loss.default "
        "new_full.default rsub.Tensor scalar_tensor.default scatter.value scatter_.value segment_reduce.default threshold_.default"
    ).split()
)
# Limits of kernels that are narrower than the dtype's range.
_EMPTY_RANGE: Final = (math.inf, -math.inf)
_OWN_RANGES: Final[Mapping[Any, Mapping[str, tuple[float, float]]]] = {
    aten.bernoulli_.float: {"p": (0.0, 1.0)},
    aten.histc.default: {"min": (-LEAST_MAXIMUM, LEAST_MAXIMUM), "max": (-LEAST_MAXIMUM, LEAST_MAXIMUM)},
    aten.huber_loss.default: {"delta": (_SMALLEST, math.inf)},
    aten.logspace.default: {"base": _EMPTY_RANGE},
    aten.logspace.out: {"base": _EMPTY_RANGE},
    aten.logspace.Scalar_Tensor: {"base": _EMPTY_RANGE},
    aten.logspace.Tensor_Scalar: {"base": _EMPTY_RANGE},
    aten.normal_.default: {"std": (0.0, math.inf)},
    aten.rrelu_with_noise.default: {"lower": (-LEAST_MAXIMUM, 0.125), "upper": (0.125, LEAST_MAXIMUM)},
    aten.rrelu_with_noise_.default: {"lower": (-LEAST_MAXIMUM, 0.125), "upper": (0.125, LEAST_MAXIMUM)},
    aten.smooth_l1_loss.default: {"beta": (0.0, math.inf)},
    aten.softshrink.default: {"lambd": (0.0, math.inf)},
    aten.uniform_.default: {"from": (-LEAST_MAXIMUM, 0.0), "to": (0.0, LEAST_MAXIMUM)},
}
_NUMBERS: Final = frozenset({"number", "float", "Optional[number]", "Optional[float]"})


class ScalarRange(msgspec.Struct, frozen=True):
    """Closed range of one scalar argument of an op.

    Attributes:
        position: position of the argument in the schema.
        name: name of the argument in the schema.
        low: smallest value in the range.
        high: greatest value in the range.
        whole: True if only integers are in the range.
        finite: True if infinities and NaN are outside of the range.
    """

    position: int
    name: str
    low: float
    high: float
    whole: bool
    finite: bool

    def holds(self, value: Any) -> bool:
        """Return True if kernels certainly accept the value."""
        kind = type(value)
        if kind is int:
            return bool(self.low <= value <= self.high)
        if kind is not float:
            return value is None
        if self.whole:
            return False
        return self.low <= value <= self.high or not (self.finite or math.isfinite(value))


class ScalarRule(msgspec.Struct, frozen=True):
    """Ranges of an op's scalars.

    Attributes:
        ranges: the range of each number among the arguments.
        any_float: True if each range contains all floats with a magnitude up to `LEAST_MAXIMUM`, the smallest maximum
            of a dtype.
    """

    ranges: tuple[ScalarRange, ...]
    any_float: bool

    def holds(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return True if all scalars are within their ranges."""
        count = len(args)
        for scalar_range in self.ranges:
            position = scalar_range.position
            if not scalar_range.holds(args[position] if position < count else kwargs.get(scalar_range.name)):
                return False
        return True


def rule_of_call(func: Any, call: Call) -> ScalarRule | None:
    """Return the rule for an inferred call and all calls with its dtypes, or None if no kernel refuses a scalar."""
    operand_dtype = call.operands[0].dtype if call.operands else None
    result_dtype = call.results[0].dtype if call.results and call.results[0] is not None else None
    return scalar_rule(func, operand_dtype, result_dtype)


def takes_any_float(func: Any, call: Call) -> bool:
    """Return True if kernels accept calls that differ from `call` only in floats of magnitude up to `LEAST_MAXIMUM`."""
    rule = rule_of_call(func, call)
    return rule is None or rule.any_float


@functools.lru_cache(maxsize=4096)
def scalar_rule(func: Any, operand: torch.dtype | None, result: torch.dtype | None) -> ScalarRule | None:
    """Return the rule for calls of `func`, or None if no kernel refuses a scalar.

    `operand` and `result` are the dtypes of the first operand and of the first result.
    """
    if not (torch.Tag.pointwise in func.tags or str(func).removeprefix("aten.") in _CONVERTING or func in _OWN_RANGES):
        return None
    low, high, whole, finite = _range_of(tuple({d for d in (operand, result) if d is not None and d is not torch.bool}))
    narrower_ranges = _OWN_RANGES.get(func, {})
    ranges: list[ScalarRange] = []
    for position, argument in enumerate(torch_private.schema_of(func).arguments):
        name = argument.name
        if str(argument.type) not in _NUMBERS:
            continue
        lowest, highest = narrower_ranges.get(name, (low, high))
        if whole and name == "exponent":
            lowest = 0.0  # an integer to a negative power is not an integer
        ranges.append(
            ScalarRange(
                position,
                name,
                max(low, lowest),
                min(high, highest),
                whole=whole and name in _FACTORS,
                finite=finite or name in narrower_ranges,
            )
        )
    any_float = all(not r.whole and r.low <= -LEAST_MAXIMUM and r.high >= LEAST_MAXIMUM for r in ranges)
    return ScalarRule(tuple(ranges), any_float) if ranges else None


def _range_of(dtypes: Sequence[torch.dtype]) -> tuple[float, float, bool, bool]:
    """Return the numbers that all of these dtypes hold: minimum, maximum, integers only, finite only."""
    infos = [torch.finfo(d) if d.is_floating_point or d.is_complex else torch.iinfo(d) for d in dtypes]
    low = max((info.min for info in infos), default=-math.inf)
    high = min((info.max for info in infos), default=math.inf)
    whole = [isinstance(info, torch.iinfo) for info in infos]
    return low, high, bool(infos) and all(whole), any(whole)


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
    """Return True if an inferred call of `func` holds for any value of its float arguments."""
    return split_name(func.name())[0] in _PACKETS


def without_floats(key: list[Any]) -> tuple[Any, ...]:
    """Return the key of a call without the values of its floats, so that calls with other floats have the same key.

    Floats that some dtype cannot hold stay in the key.
    """
    kept_parts: list[Any] = []
    number_follows = False
    for part in key:
        if not number_follows or (type(part) is float and not -LEAST_MAXIMUM <= part <= LEAST_MAXIMUM):
            kept_parts.append(part)
        number_follows = part is float and not number_follows
    return tuple(kept_parts)
