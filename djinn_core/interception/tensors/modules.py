"""`nn.Module.to`, `.cpu()` and the like keep Parameter objects, their hooks and attributes, and tied weights.

On other accelerators a Parameter takes over the data that was moved (`param.data = moved`). A remote tensor is of another
class than a CPU tensor, so here the two exchange what they are: the Parameter stays the same object, with its
attributes and hooks, for optimizers, weak references and all other holders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from djinn_core import torch_objects
from djinn_core.interception.device.device_state import device_state
from djinn_core.interception.tensors.batched_fetch import BatchedFetch, expecting, tensors_here, tensors_of
from djinn_core.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.interception.tensors.subclasses import class_of_user, remote_class
from djinn_core.torch_private import ModuleApply
from djinn_core.tracebacks import shorten_through

_OF_THE_VALUE = ("remote", "_is_param")  # attributes that go with the data; all others stay with the object

Swap = Callable[[torch.Tensor, torch.Tensor], None]


def keep_parameters(apply: ModuleApply) -> ModuleApply:
    """`Module._apply` that swaps remote parameters in place.

    PyTorch swaps towards a traceable subclass by itself; away from one it would make new Parameters, and an optimizer
    built before would go on training the old ones.
    """

    @functools.wraps(apply)
    def applied(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        held = torch_objects.held_by_script(module)
        thread = device_state.thread
        outer, thread.converts_module = thread.converts_module, True
        try:
            with expecting(BatchedFetch(lambda: tensors_of(module), lambda: tensors_here(module))):
                return _apply_swapping(apply, module, fn, *args, **kwargs)
        except BaseException as error:
            shorten_through(error)
            raise
        finally:
            thread.converts_module = outer
            torch_objects.hold_in_script(module, held)

    return applied


def fetch_modules_together(apply: ModuleApply) -> ModuleApply:
    """`Module._apply` whose fetches and uploads share round trips. PyTorch converts the parameters, as for every accelerator."""

    @functools.wraps(apply)
    def applied(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        thread = device_state.thread
        if thread.converts_module:  # the outer module
            return apply(module, fn, *args, **kwargs)
        thread.converts_module = True
        try:
            with expecting(BatchedFetch(lambda: tensors_of(module), lambda: tensors_here(module))):
                return apply(module, functools.partial(_converted, fn), *args, **kwargs)
        except BaseException as error:
            shorten_through(error)
            raise
        finally:
            thread.converts_module = False

    return applied


def _converted(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """The result of a conversion. Graphs that were recorded with a converted parameter cannot be used any more."""
    made = fn(tensor)
    if (isinstance(tensor, LazyTensor) or isinstance(made, LazyTensor)) and (made.device, made.dtype) != (
        tensor.device,
        tensor.dtype,
    ):
        torch_objects.poison_gradient_node(tensor, _moved)
    return made


def _apply_swapping(
    apply: ModuleApply, module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
) -> Any:
    remote = any(isinstance(p, LazyTensor) for p in module.parameters(recurse=False))
    if not remote or torch.__future__.get_swap_module_params_on_conversion():
        return apply(module, fn, *args, **kwargs)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return apply(module, lambda tensor: _swappable(tensor, fn(tensor)), *args, **kwargs)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _swappable(before: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """The result of a conversion; of a parameter without a shape a tensor from which PyTorch can make a Parameter to swap with."""
    if isinstance(before, torch.nn.UninitializedParameter):
        return torch.empty(0, device=made.device, dtype=made.dtype)
    return made


def swap_in_conversions(swap: Swap) -> Swap:
    """`torch.utils.swap_tensors`, which lets go of hooks and attributes, and refuses tensors that are referenced weakly."""

    @functools.wraps(swap)
    def swapped(kept: torch.Tensor, made: torch.Tensor) -> None:
        if device_state.thread.converts_module and (isinstance(kept, LazyTensor) or isinstance(made, LazyTensor)):
            _take_over(kept, made)
        else:
            swap(kept, made)

    return swapped


def _take_over(kept: torch.Tensor, made: torch.Tensor) -> None:
    """Make `kept` what `made` is; `made` becomes what `kept` was, and is not needed any more."""
    torch_objects.poison_gradient_node(kept, _moved)
    mine, other = vars(kept), vars(made)
    for name in _OF_THE_VALUE:
        swapped = {id(d): d.pop(name) for d in (mine, other) if name in d}
        if id(mine) in swapped:
            other[name] = swapped[id(mine)]
        if id(other) in swapped:
            mine[name] = swapped[id(other)]
    kept.__class__, made.__class__ = _class_after(kept, made), type(kept)
    torch_objects.swap_contents(kept, made)


def _class_after(kept: torch.Tensor, made: torch.Tensor) -> type[torch.Tensor]:
    """That of `made`, but where the user gave `kept` a class of his own, it stays."""
    if isinstance(kept, torch.nn.UninitializedParameter):
        return (
            remote_class(torch.nn.UninitializedParameter)
            if isinstance(made, LazyTensor)
            else torch.nn.UninitializedParameter
        )
    cls = class_of_user(kept)
    if cls in {torch.Tensor, torch.nn.Parameter}:
        return type(made)
    return remote_class(cls) if isinstance(made, LazyTensor) else cls


def _moved(_: Any) -> NoReturn:
    raise RuntimeError(
        "backward reached a parameter that was moved or converted after the forward pass: call .to() before the forward "
        "pass, or after both"
    )
