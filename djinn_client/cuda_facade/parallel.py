"""`torch.nn.DataParallel` over one device, and `torch.distributed`, which has none to speak to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import comm

from djinn_core.errors import UnsupportedOperation


def replace() -> None:
    """Scatter to one device; refuse process groups of NCCL."""
    comm.scatter = scatter
    if torch.distributed.is_available():
        torch.distributed.init_process_group = _without_nccl(torch.distributed.init_process_group)


def scatter(tensor: torch.Tensor, devices: Sequence[Any] | None = None, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """The whole of `tensor` on the one device.

    Raises:
        UnsupportedOperation: there is more than one.
    """
    if devices is None or len(devices) != 1:
        raise UnsupportedOperation(
            "tensors cannot be scattered: a session has one device. Use DataParallel(device_ids=[0])"
        )
    return (tensor.to(devices[0]),)


def _without_nccl(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend is None or "nccl" in str(backend).lower():
            raise UnsupportedOperation(
                "torch.distributed cannot connect remote devices: run the script in one process, without torchrun, or "
                "name the backend 'gloo' for tensors on the CPU"
            )
        init(backend, *args, **kwargs)

    return init_process_group
