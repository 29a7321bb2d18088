"""Device interface of `torch.compile` while it traces, where tensors report `cuda`.

PyTorch's C++ knows one accelerator, which has the remote device's own name. Autograd asks that for streams, also for the tensors
that are generated while a backward pass is traced: those have the own name, or no stream would be found for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

from djinn_client.cuda_facade.tensors import meant

_DEVICE_PLACE = 7  # of the device among the arguments of `_make_wrapper_subclass`


def replace() -> None:
    """Let tracing work with both names."""
    _make_with_own_name()
    _accept_both_names()


def _make_with_own_name() -> None:
    make: Callable[..., Any] = torch.Tensor._make_wrapper_subclass

    @functools.wraps(make)
    def make_wrapper(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is FunctionalTensor and len(args) >= _DEVICE_PLACE:
            before, device, after = args[: _DEVICE_PLACE - 1], args[_DEVICE_PLACE - 1], args[_DEVICE_PLACE:]
            args = (*before, meant(device), *after)
        return make(cls, *args, **kwargs)

    torch.Tensor._make_wrapper_subclass = staticmethod(make_wrapper)  # type: ignore[method-assign]


def _accept_both_names() -> None:
    """`torch.accelerator`'s functions, some of which compiled functions call with the device of a tensor."""
    index: Callable[..., int] = torch.accelerator._utils._get_device_index

    @functools.wraps(index)
    def index_of_either(device: Any, optional: bool = False) -> int:
        return index(meant(device), optional)

    for module in (torch.accelerator, torch.accelerator.memory, torch.accelerator._utils):
        module._get_device_index = index_of_either  # type: ignore[attr-defined]
