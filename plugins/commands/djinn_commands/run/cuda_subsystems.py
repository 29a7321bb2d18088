"""Subsystems of PyTorch that use the name `cuda`, such as autocasting, `torch.compile` and profilers.

PyTorch keeps the autocast state per device type, behind functions that take the type's name. PyTorch's C++ knows one
accelerator, under the name `remote_accelerator`. Autograd requests streams of that accelerator, also for the tensors of a
traced backward pass. So these tensors keep that name. Otherwise autograd would find no stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.autograd.profiler
import torch.cuda.memory
import torch.distributed
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.parallel import comm

from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_commands.run.cuda_tensors import meant
from djinn_core.errors import UnsupportedOperation
from djinn_core.logs import get_logger

_log = get_logger("djinn.interception")
_AUTOCAST = ("get_autocast_dtype", "is_autocast_enabled", "set_autocast_dtype", "set_autocast_enabled")


def _by_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with `cuda` as the default device type and as a name of the remote device."""

    @functools.wraps(function)
    def by_device(device_type: Any = "cuda", *args: Any) -> Any:
        if not isinstance(device_type, str):
            device_type, args = "cuda", (device_type, *args)
        return function(DEVICE_NAME if device_type == "cuda" else device_type, *args)

    return by_device


_DEVICE_PLACE = 7  # position of the device among the arguments of `_make_wrapper_subclass`


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
    """Make functions of `torch.accelerator` also accept `cuda`, because compiled code passes them tensors' devices."""
    index: Callable[..., int] = torch.accelerator._utils._get_device_index

    @functools.wraps(index)
    def index_of_either(device: Any, optional: bool = False) -> int:
        return index(meant(device), optional)

    for module in (torch.accelerator, torch.accelerator.memory, torch.accelerator._utils):
        module._get_device_index = index_of_either  # type: ignore[attr-defined]


def scatter(tensor: torch.Tensor, devices: Sequence[Any] | None = None, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """Return `tensor` as the only part, for `torch.cuda.comm.scatter` with one device.

    Raises:
        UnsupportedOperation: `devices` has more than one device.
    """
    if devices is None or len(devices) != 1:
        raise UnsupportedOperation(
            "tensors cannot be scattered to several devices, because a session has one device: use DataParallel(device_ids=[0])"
        )
    return (tensor.to(devices[0]),)


def _without_nccl(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend is None or "nccl" in str(backend).lower():
            raise UnsupportedOperation(
                "torch.distributed cannot connect remote devices: run the script in one process without torchrun, or "
                "use the backend 'gloo' with tensors on the CPU"
            )
        init(backend, *args, **kwargs)

    return init_process_group


def _without_cuda(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(  # noqa: N807 - it becomes the constructor
        self: Any, enabled: bool = True, *, use_cuda: bool = False, use_device: str | None = None, **kwargs: Any
    ) -> None:
        if use_cuda or use_device == "cuda":
            _log.warning("the profiler records this process, not the executor's GPU. Use djinn.profile() for both")
            use_device = None
        init(self, enabled, use_device=use_device, **kwargs)

    return __init__


def _refuse_history(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedOperation(
        "executors record no history of GPU memory: use torch.cuda.memory_stats() for present figures"
    )


def replace() -> None:
    """Replace functions of the subsystems: each uses the remote device, raises an error, or acts on this process only."""
    for name in _AUTOCAST:
        setattr(torch, name, _by_device(getattr(torch, name)))
    for verb in ("get", "set"):
        dtype = functools.partial(getattr(torch, f"{verb}_autocast_dtype"), DEVICE_NAME)
        setattr(torch, f"{verb}_autocast_gpu_dtype", dtype)
    _make_with_own_name()
    _accept_both_names()
    comm.scatter = scatter
    if torch.distributed.is_available():
        torch.distributed.init_process_group = _without_nccl(torch.distributed.init_process_group)
    profile: Any = torch.autograd.profiler.profile
    profile.__init__ = _without_cuda(profile.__init__)
    for name in ("_record_memory_history", "_dump_snapshot", "_snapshot"):
        setattr(torch.cuda.memory, name, _refuse_history)
