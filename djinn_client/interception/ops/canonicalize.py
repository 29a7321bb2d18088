"""Canonicalization: calls with the same meaning are recorded alike, so that programs match their cached templates.

Ops that kernels do on the way to their own are recorded as well where the client has to know what they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from djinn_client.interception.dispatch import handles, record
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.torch_private import schema_of

aten = torch.ops.aten


@handles(aten.fill_.Scalar)
def fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`tensor.fill_(True)` is `fill_(1)` for every dtype; a bool would be a constant of the form, a number is a slot.

    The last step of a `generate()` differs from the others in nothing but such a bool.
    """
    target, value = args
    return record(func, (target, int(value) if isinstance(value, bool) else value), kwargs)


@handles(aten.index_put_.default, aten._index_put_impl_.default)
def put_at_mask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record `tensor[mask] = number` as `masked_fill_` if the mask or the number is in the memory of `tensor`.

    PyTorch's kernel for the CPU does so for every mask. `masked_fill_` may write to its own mask and number, `index_put_` may not.
    """
    target, indices, values, *rest = args
    accumulates = kwargs.get("accumulate", rest[0] if rest else False)
    mask = None if accumulates or values.numel() != 1 else _only_mask(target, indices)
    if mask is None or not (_shares_memory(mask, target) or _shares_memory(values, target)):
        return record(func, args, kwargs)
    for _ in range(mask.dim(), target.dim() - _leading(indices)):
        mask = aten.unsqueeze.default(mask, -1)
    number = aten.view.default(values, []) if values.dim() else values
    return record(aten.masked_fill_.Tensor, (target, mask, number), {})


def _leading(indices: Sequence[torch.Tensor | None]) -> int:
    """The number of dimensions before the first index."""
    return next(dim for dim, index in enumerate(indices) if index is not None)


def _only_mask(target: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The only index, if it is a mask that fits `target`; otherwise None."""
    given = [index for index in indices if index is not None]
    if len(given) != 1 or given[0].dtype not in {torch.bool, torch.uint8}:
        return None
    (mask,), dim = given, _leading(indices)
    return mask if mask.shape == target.shape[dim : dim + mask.dim()] else None


def _shares_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if not isinstance(tensor, LazyTensor) or not isinstance(other, LazyTensor):
        return False
    return tensor.remote.storage == other.remote.storage


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
