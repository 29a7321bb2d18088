"""Trials of the CPU's kernels on small tensors: what they say of dtypes and numbers holds for all sizes, and for meta tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from djinn_core import torch_private

aten = torch.ops.aten
_SIZES: Final = frozenset({"size", "pad"})
_PADDINGS: Final = frozenset({"padding", "output_padding"})
_COUNTS: Final = {"steps": 2, "bins": 2, "n": 2, "m": 2, "window_length": 2, "k": 1, "num_samples": 1}
_RANGE: Final = {"start": 0, "end": 1, "step": 1}
# These write a number to a single element without a check.
_FILLING: Final = frozenset({aten.fill_.Scalar, aten.full.default, aten.full_like.default, aten.new_full.default})


def try_small(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Call the CPU's kernel with these arguments, whose tensors are made to have one element. No random number is drawn.

    The element is a 1 where elements do not index others: division by 0 is refused.

    Raises:
        Exception: as eager PyTorch, and where small tensors do not fit each other.
    """
    names = [a.name for a in torch_private.schema_of(func).arguments]
    length, filled = 2 if func in _FILLING else 1, int(torch.Tag.pointwise in func.tags)
    small = [_small(name, argument, length, filled) for name, argument in zip(names, args, strict=False)]
    if func is aten.arange.start_step:
        small = [_RANGE[name] for name in names[: len(args)]]
    named = {name: _small(name, value, length, filled) for name, value in kwargs.items()}
    state = torch.default_generator.get_state() if torch.Tag.nondeterministic_seeded in func.tags else None
    try:
        func(*small, **named)
    finally:
        if state is not None:
            torch.default_generator.set_state(state)


def _small(name: str, argument: Any, length: int, filled: int) -> Any:
    if isinstance(argument, torch.Tensor) and argument.dim() == 0 and argument.device.type == "cpu":
        return argument  # a number, which decides dtypes in another way than a tensor
    if isinstance(argument, torch.Tensor):
        shape = (0,) if name == "out" else (length,) * argument.dim()
        return torch.full(shape, 1 if name == "lengths" else filled, dtype=argument.dtype)
    if isinstance(argument, torch.device):
        return torch.device("cpu")
    if name in _COUNTS and type(argument) is int:
        return min(argument, _COUNTS[name])
    if name in _SIZES and isinstance(argument, (list, tuple)):
        return [length] * len(argument)
    if name in _PADDINGS and isinstance(argument, (list, tuple)):
        return [min(n, 1) for n in argument]
    if isinstance(argument, (list, tuple)):
        return [_small(name, one, length, filled) for one in argument]
    return argument
