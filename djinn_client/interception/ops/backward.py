"""Backward passes: on the caller's thread."""

from __future__ import annotations

import functools
from time import perf_counter
from typing import Any

import torch

from djinn_client.interception.recording.recorder import current_or_none
from djinn_client.torch_dispatch import EngineRun
from djinn_client.tracebacks import shorten_through
from djinn_core.ir.module_path import BACKWARD


def guard_engine(run: EngineRun) -> EngineRun:
    """Wrap the entry of the autograd engine, so that capture stays in order.

    Multithreading is off for the run, because a program belongs to one thread.
    """

    @functools.wraps(run)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        recorder = current_or_none()
        if recorder is None:
            return run(*args, **kwargs)
        outer = recorder.differentiating, recorder.module
        recorder.differentiating, recorder.module = True, None
        moments = recorder.module_moments
        if moments is not None:
            moments.extend((perf_counter(), BACKWARD))
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return run(*args, **kwargs)
        except BaseException as error:
            shorten_through(error)
            raise
        finally:
            recorder.differentiating, recorder.module = outer
            if moments is not None:
                moments.extend((perf_counter(), None))

    return guarded
