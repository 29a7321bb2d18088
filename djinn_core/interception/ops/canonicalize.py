"""Canonicalization: calls with the same meaning are recorded alike, so that programs match their cached templates."""

from __future__ import annotations

from typing import Any

import torch

from djinn_core.interception.dispatch import handles, record

aten = torch.ops.aten


@handles(aten.fill_.Scalar)
def fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`tensor.fill_(True)` is `fill_(1)` for every dtype; a bool would be a constant of the form, a number is a slot.

    The last step of a `generate()` differs from the others in nothing but such a bool.
    """
    target, value = args
    return record(func, (target, int(value) if isinstance(value, bool) else value), kwargs)
