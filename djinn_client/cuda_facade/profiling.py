"""Profilers that look at a GPU of this process: they look at the process alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.autograd.profiler
import torch.cuda.memory

from djinn_core.errors import UnsupportedOperation
from djinn_core.logs import get_logger

_log = get_logger("djinn.interception")


def replace() -> None:
    """Have PyTorch's profiler time no GPU, and refuse histories of its memory."""
    profile: Any = torch.autograd.profiler.profile
    profile.__init__ = _without_cuda(profile.__init__)
    for name in ("_record_memory_history", "_dump_snapshot", "_snapshot"):
        setattr(torch.cuda.memory, name, _refuse_history)


def _without_cuda(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(  # noqa: N807 - it becomes the constructor
        self: Any, enabled: bool = True, *, use_cuda: bool = False, use_device: str | None = None, **kwargs: Any
    ) -> None:
        if use_cuda or use_device == "cuda":
            _log.warning("the profiler shows this process, not the executor's GPU")
            use_device = None
        init(self, enabled, use_device=use_device, **kwargs)

    return __init__


def _refuse_history(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedOperation(
        "histories of GPU memory are not kept on executors; torch.cuda.memory_stats() has figures"
    )
