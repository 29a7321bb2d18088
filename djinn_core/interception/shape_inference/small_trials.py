"""Trials of the CPU's kernels on small tensors: what they say of dtypes and numbers holds for all sizes, and for meta tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from djinn_core import torch_private

_LENGTH: Final = 2  # of each dimension; kernels convert the number for a single element in another way
_SIZES: Final = {"size": _LENGTH, "pad": 1}
_COUNTS: Final = frozenset({"steps", "bins"})


def try_small(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Call the CPU's kernel with these arguments, whose tensors and sizes are made small. No random number is drawn.

    Raises:
        Exception: as eager PyTorch, and where small tensors do not fit each other.
    """
    names = [a.name for a in torch_private.schema_of(func).arguments]
    small = [_small(name, argument) for name, argument in zip(names, args, strict=False)]
    named = {name: _small(name, value) for name, value in kwargs.items()}
    state = torch.default_generator.get_state() if torch.Tag.nondeterministic_seeded in func.tags else None
    try:
        func(*small, **named)
    finally:
        if state is not None:
            torch.default_generator.set_state(state)


def _small(name: str, argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        shape = (0,) if name == "out" else (_LENGTH,) * argument.dim()
        return torch.full(shape, int(name == "lengths"), dtype=argument.dtype)
    if isinstance(argument, torch.device):
        return torch.device("cpu")
    if name in _COUNTS and type(argument) is int:
        return min(argument, _LENGTH)
    if name in _SIZES and isinstance(argument, (list, tuple)):
        return [_SIZES[name]] * len(argument)
    return argument
