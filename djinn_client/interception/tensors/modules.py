"""`nn.Module.to`, `.cpu()` and the like: the tensors of a module travel together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from djinn_client import torch_objects
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.tensors.batched_fetch import BatchedFetch, expecting, tensors_here, tensors_of
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.torch_dispatch import ModuleApply
from djinn_client.tracebacks import shorten_through


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


def _moved(_: Any) -> NoReturn:
    raise RuntimeError(
        "backward reached a parameter that was moved or converted after the forward pass: call .to() before the forward "
        "pass, or after both"
    )
