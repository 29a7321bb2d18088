"""Ops that return the same, as far as metadata goes, whatever floats they are given.

Optimizers and schedules hand another number to them in every step: a learning rate, a correction of a bias. A call that was
seen with one float is then as good as seen with all; else each step would infer anew what it returns, and remember it.
Only ops that refuse no float are listed: others must see the number to raise what eager PyTorch would.
"""

from __future__ import annotations

from typing import Any, Final

import torch

_PACKETS: Final = (
    "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "pow", "pow_", "lerp", "lerp_", "addcmul", "addcmul_",
    "addcdiv", "addcdiv_", "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "eq", "ne",
    "lt", "le", "gt", "ge", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_",
)  # fmt: skip


def _overloads() -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name) for name in _PACKETS]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


TAKE_ANY_FLOAT: Final = _overloads()


def without_floats(key: list[Any]) -> tuple[Any, ...]:
    """The key of a call without the values of its floats; that they are floats stays."""
    kept: list[Any] = []
    number_follows = False
    for part in key:
        if not number_follows:
            kept.append(part)
        number_follows = part is float and not number_follows
    return tuple(kept)
