"""What `torch.compile` asks of devices while it traces: tensors that it makes up say `cuda`, as those do that they stand for.

PyTorch's C++ knows one accelerator, which has the remote device's own name. Autograd asks it for streams, and must be told that
name for tensors that are made up, too, or its backward pass finds no stream for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from djinn_core.cuda_facade.tensors import meant


def replace() -> None:
    """Let tracing work with both names."""
    _answer_with_own_name()
    _accept_both_names()


def _answer_with_own_name() -> None:
    """`prim::device`, with which C++ asks a made up tensor for its device."""
    dispatch = vars(FakeTensor)["__torch_dispatch__"].__func__
    asked = torch.ops.prim.device.default

    @functools.wraps(dispatch)
    def dispatch_or_name(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = dispatch(cls, func, types, args, kwargs or {})
        return meant(found) if func is asked else found

    FakeTensor.__torch_dispatch__ = classmethod(dispatch_or_name)  # type: ignore[assignment]


def _accept_both_names() -> None:
    """`torch.accelerator`'s functions, some of which compiled functions call with the device of a tensor."""
    index: Callable[..., int] = torch.accelerator._get_device_index  # noqa: SLF001 - see `torch_private`

    @functools.wraps(index)
    def index_of_either(device: Any, optional: bool = False) -> int:
        return index(meant(device), optional)

    for module in (torch.accelerator, torch.accelerator.memory, torch.accelerator._utils):  # noqa: SLF001
        module._get_device_index = index_of_either  # noqa: SLF001
