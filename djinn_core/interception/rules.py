"""Ops whose meta kernel is missing or says something else than the kernels that compute.

Each rule takes the meta tensors and returns what `func` would, as meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Rule = Callable[..., Any]


def _batch_norm(func: Any) -> Rule:
    """In evaluation the kernels return empty statistics, the meta kernel full ones."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        out, mean, rstd = func(*args, **kwargs)
        training = kwargs.get("training", args[5] if len(args) > 5 else True)
        return (out, mean, rstd) if training else (out, mean.new_empty(0), rstd.new_empty(0))

    return rule


def _bin_edges(data: torch.Tensor, bins: Sequence[int], **_: Any) -> list[torch.Tensor]:
    return [data.new_empty(count + 1) for count in bins]


_RULES: dict[Any, Rule] = {
    aten.native_batch_norm.default: _batch_norm(aten.native_batch_norm.default),
    aten._native_batch_norm_legit.default: _batch_norm(aten._native_batch_norm_legit.default),
    aten._histogramdd_bin_edges.default: _bin_edges,
}


# Ops whose results follow from metadata, but in a way that only the kernel knows: asked once per call, then remembered.
KERNEL_DECIDES = frozenset({
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
})  # fmt: skip


def rule_for(func: Any) -> Rule:
    """The rule for `func`: itself, where its meta kernel is right."""
    rule: Rule = _RULES.get(func, func)
    return rule
