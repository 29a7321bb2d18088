"""`nn.Module.to` and its like keep Parameter objects and ties in both directions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from djinn_core.interception.lazy_tensor import LazyTensor, conversion
from djinn_core.torch_private import ModuleApply


def keep_parameters(apply: ModuleApply) -> ModuleApply:
    """`Module._apply` that swaps remote parameters in place.

    PyTorch swaps towards a traceable subclass by itself; away from one it would make new Parameters, and an optimizer
    built before would go on training the old ones.
    """

    @functools.wraps(apply)
    def applied(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        outer, conversion.active = conversion.active, True
        try:
            return _apply_swapping(apply, module, fn, *args, **kwargs)
        finally:
            conversion.active = outer

    return applied


def _apply_swapping(
    apply: ModuleApply, module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
) -> Any:
    remote = any(isinstance(p, LazyTensor) for p in module.parameters(recurse=False))
    if not remote or torch.__future__.get_swap_module_params_on_conversion():
        return apply(module, fn, *args, **kwargs)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return apply(module, fn, *args, **kwargs)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
