"""Ops that are not PyTorch's own: run as what they are made of, where that is known."""

from __future__ import annotations

from typing import Any

from djinn_core import torch_private
from djinn_core.errors import UnsupportedOperation
from djinn_core.interception.lazy_tensor import DEVICE_NAME
from djinn_core.ir.operators import allowed_operators


def is_allowed(func: Any) -> bool:
    """Whether programs may contain `func`."""
    return func.name() in allowed_operators()


def run_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that programs may not contain as the ops that it is made of, each of which is recorded.

    Raises:
        UnsupportedOperation: it has no such implementation.
    """
    kernel = torch_private.composite_kernel(func)
    if kernel is not None:
        return kernel(*args, **kwargs)
    raise UnsupportedOperation(
        f"{func.name()} cannot run on {DEVICE_NAME}: it is not on the allow-list of ops and is not made of ops that are; "
        "move its inputs to the CPU first"
    )
