"""`torch.empty(..., pin_memory=True)` and its like, which ask PyTorch's C++ for an allocator that Python cannot give it.

The tensor is made in ordinary memory and pinned afterwards, as `tensor.pin_memory()` does it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from djinn_client.torch_dispatch import pass_for

_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)


def replace() -> None:
    """Have PyTorch's factories make first and pin then."""
    for name in _FACTORIES:
        made = getattr(torch, name)
        pinning = _pinning(made)
        pass_for(pinning, made)
        setattr(torch, name, pinning)


def _pinning(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, pin_memory: bool | None = None, **kwargs: Any) -> torch.Tensor:
        made = factory(*args, **kwargs)
        return made.pin_memory() if pin_memory else made

    return make
