"""Backward passes: on the caller's thread, and with errors that arrive as themselves."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from djinn_core.interception.recording.recorder import current
from djinn_core.interception.recording.site import Boundary, mark_boundary
from djinn_core.torch_private import EngineRun
from djinn_core.tracebacks import shorten_through


class _Kept(threading.local):
    def __init__(self) -> None:
        self.errors: list[BaseException] = []


_kept = _Kept()


def keep_error(error: BaseException) -> None:
    """Keep what Python code raised while the engine unwinds; `guard_engine` raises it when the engine is left."""
    _kept.errors.append(error)


def guard_engine(run: EngineRun) -> EngineRun:
    """The engine's entry, so that capture stays in order and what is raised inside arrives.

    Multithreading is off for the run: PyTorch's Python device guard knows one device, and a program belongs to one
    thread.
    """

    @functools.wraps(run)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        before, _kept.errors = _kept.errors, []
        recorder = current()
        outer = recorder.differentiating, recorder.module, recorder.issued.backward
        recorder.differentiating, recorder.module, recorder.issued.backward = True, None, None
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return run(*args, **kwargs)
        except BaseException as error:
            if not _kept.errors:
                shorten_through(error)
                raise
            raise _kept.errors[0] from (None if isinstance(error, SystemError) else error)
        finally:
            _kept.errors = before
            recorder.differentiating, recorder.module, recorder.issued.backward = outer

    for function in (run, guarded):
        mark_boundary(function, Boundary.BACKWARD)
    return guarded
