"""Fake tensors of a tracer, which have metadata only, among the operands of an op."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from djinn_core.interception.tensors.lazy_tensor import LazyTensor


def fake_mode_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FakeTensorMode | None:
    """The mode of the first fake tensor among the arguments; None if there is none."""
    return next((a.fake_mode for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, FakeTensor)), None)


def run_as_fake(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` on metadata alone: a program is being traced, and nothing is recorded."""
    args, kwargs = pytree.tree_map_only(LazyTensor, mode.from_tensor, (args, kwargs))
    with mode:
        return func(*args, **kwargs)
