"""`torch.set_default_dtype`: the client applies it to ops, because an executor keeps a default of its own.

Where an op needs floats, integers become floats of the default dtype. If that is not the default dtype of executors, the client
converts them first.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.ir.program import Call
from djinn_core.torch_private import schema_of

EXECUTORS_HAVE = torch.float32


def as_floats(func: Any, args: tuple[Any, ...], call: Call) -> tuple[Any, ...] | None:
    """The arguments with whole numbers converted to the default dtype; None if `func` does not depend on that."""
    default = torch.get_default_dtype()
    if default == EXECUTORS_HAVE or torch.Tag.pointwise not in func.tags:
        return None
    if any(m.dtype.is_floating_point or m.dtype.is_complex for m in call.operands):
        return None
    if not any(m is not None and m.dtype in {default, default.to_complex()} for m in call.results):
        return None
    return tuple(_converted(a, default) if index or "where" not in func.name() else a for index, a in enumerate(args))


def with_default_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a factory op with the dtype that it has by default here."""
    default = torch.get_default_dtype()
    if default == EXECUTORS_HAVE or kwargs.get("dtype") is not None or not _is_factory(func):
        return kwargs
    filling = args[1] if func is torch.ops.aten.full.default else 0.0
    return {**kwargs, "dtype": torch.tensor(filling, device="cpu").dtype}


@functools.cache
def _is_factory(func: Any) -> bool:
    """True if `func` makes a tensor of numbers alone, whose dtype depends on the default dtype."""
    arguments = {a.name: a for a in schema_of(func).arguments}
    if not {"dtype", "device"} <= set(arguments) or arguments["dtype"].default_value is not None:
        return False
    return not any("Tensor" in str(a.type) for a in arguments.values())


def _converted(argument: Any, dtype: torch.dtype) -> Any:
    return argument.to(dtype) if isinstance(argument, LazyTensor) else argument
