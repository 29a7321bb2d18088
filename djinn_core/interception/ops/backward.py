"""Backward passes: on the caller's thread, and with errors that arrive as themselves."""

from __future__ import annotations

import functools
from time import perf_counter
from typing import Any

import torch

from djinn_core.interception.recording.call_site import Boundary, mark_boundary
from djinn_core.interception.recording.recorder import current_or_none
from djinn_core.ir.module_path import BACKWARD
from djinn_core.torch_private import EngineRun, take_pending_errors
from djinn_core.tracebacks import shorten_through


def guard_engine(run: EngineRun) -> EngineRun:
    """Wrap the entry of the autograd engine, so that capture stays in order and errors inside reach the caller.

    Multithreading is off for the run: PyTorch's Python device guard knows one device, and a program belongs to one
    thread.
    """

    @functools.wraps(run)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        take_pending_errors()  # of before
        recorder = current_or_none()
        if recorder is None:
            return run(*args, **kwargs)
        outer = recorder.differentiating, recorder.module, recorder.call_sites.backward
        recorder.differentiating, recorder.module, recorder.call_sites.backward = True, None, None
        moments = recorder.module_moments
        if moments is not None:
            moments.extend((perf_counter(), BACKWARD))
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return run(*args, **kwargs)
        except BaseException as error:
            pending = take_pending_errors()
            if not pending:
                shorten_through(error)
                raise
            raise pending[0] from (None if isinstance(error, SystemError) else error)
        finally:
            recorder.differentiating, recorder.module, recorder.call_sites.backward = outer
            if moments is not None:
                moments.extend((perf_counter(), None))

    for function in (run, guarded):
        mark_boundary(function, Boundary.BACKWARD)
    return guarded
