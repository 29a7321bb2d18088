"""Backward passes: on the caller's thread, and with errors that arrive as themselves."""

from __future__ import annotations

import functools
from typing import Any

import torch

from djinn_core.interception.dispatch import take_backward_errors
from djinn_core.torch_private import EngineRun


def guard_engine(run: EngineRun) -> EngineRun:
    """The engine's entry, so that capture stays in order and a failing op raises its own error.

    Multithreading is off for the run: PyTorch's Python device guard knows one device, and a program belongs to one
    thread. An exception in a Python kernel inside the engine would abort the process; `dispatch` kept it instead.
    """

    @functools.wraps(run)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return run(*args, **kwargs)
        except RuntimeError as error:
            kept = take_backward_errors()
            if not kept:
                raise
            raise kept[0] from error

    return guarded
