"""Canonicalization: calls with the same meaning are recorded alike, so that programs match their cached templates.

Ops that kernels do on the way to their own are recorded as well where the client has to know what they change.
"""

from __future__ import annotations

from typing import Any

import torch

from djinn_core.interception.dispatch import handles, record
from djinn_core.torch_private import schema_of

aten = torch.ops.aten


@handles(aten.fill_.Scalar)
def fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`tensor.fill_(True)` is `fill_(1)` for every dtype; a bool would be a constant of the form, a number is a slot.

    The last step of a `generate()` differs from the others in nothing but such a bool.
    """
    target, value = args
    return record(func, (target, int(value) if isinstance(value, bool) else value), kwargs)


@handles(aten._fused_moving_avg_obs_fq_helper.default)
def observe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fake quantization by channels: observers that are empty get an element for each channel first, as the kernel does it."""
    schema = (a.name for a in schema_of(func).arguments)
    given = dict(zip(schema, args, strict=False)) | kwargs
    limits = {"running_min": torch.inf, "running_max": -torch.inf}
    if given.get("per_row_fake_quant") and given["running_min"].numel() == 0:
        channels = given["self"].shape[given["ch_axis"]]
        for name in ("running_min", "running_max", "scale", "zero_point"):
            observer = aten.resize_.default(given[name], [channels])
            if name in limits:
                aten.fill_.Scalar(observer, limits[name])
    return record(func, args, kwargs)
