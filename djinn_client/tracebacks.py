"""Tracebacks that show only the user's lines, without this package's frames.

The frames are removed when an error leaves the package, so `sys.excepthook`, notebooks, pytest and loggers all show
the same traceback. Without an error this costs nothing: a `try` block is free.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from djinn_core.errors import DjinnError
from djinn_core.logs import shows_debug

P = ParamSpec("P")
R = TypeVar("R")

_DEFECTS = (AttributeError, AssertionError, KeyError, NameError, ZeroDivisionError)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_own(frame: FrameType) -> bool:
    name = _package(frame)
    return name == "djinn" or name.startswith("djinn_")


def _is_machinery(frame: FrameType) -> bool:
    """Return True if the frame belongs to this package, or to PyTorch or the standard library called by it."""
    return _is_own(frame) or (name := _package(frame)) == "torch" or name in sys.stdlib_module_names


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn on the user's line that called into this package."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and _is_machinery(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def shorten(error: BaseException) -> None:
    """Remove this package's frames from the traceback, and frames of PyTorch and the standard library that it called.

    Call this in the handler that caught `error`, and raise it with a bare `raise`, which adds no frame. Errors that
    this package handled before are removed as well. Nothing changes while debug messages are shown, or for errors that
    look like a bug in this package.
    """
    if not shows_debug() and not _is_defect(error):
        _remove_handled_errors(error)
        _remove_frames(error, _is_machinery)


def shorten_through(error: BaseException) -> None:
    """Remove only this package's frames, because frames of the user and of PyTorch lie between them."""
    if not shows_debug() and not _is_defect(error):
        _remove_frames(error, _is_own)


def _remove_frames(error: BaseException, is_hidden: Callable[[FrameType], bool]) -> None:
    visible: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        if not is_hidden(entry.tb_frame):
            visible.append(entry)
        entry = entry.tb_next
    head: TracebackType | None = None
    for entry in reversed(visible):
        # An interrupt can occur at an instruction without a line. `tb_lineno` is None or -1 there.
        line: int | None = entry.tb_lineno
        head = TracebackType(head, entry.tb_frame, entry.tb_lasti, -1 if line is None else line)
    error.__traceback__ = head


def for_users(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: remove this package's frames from the errors of a function. Do not use it for functions that each op calls."""

    @functools.wraps(function)
    def entered(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            shorten(error)
            raise

    return entered


def _is_defect(error: BaseException) -> bool:
    """Return True if the error is a bug in this package rather than a mistake in the user's program."""
    if isinstance(error, DjinnError) or not isinstance(error, _DEFECTS):
        return False
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry is not None and _is_own(entry.tb_frame)


def _remove_handled_errors(error: BaseException) -> None:
    """Remove from the chain of `error` the errors that this package or PyTorch handled. Errors that the user handled stay."""
    if error.__cause__ is not None and _began_inside(error.__cause__):
        error.__cause__ = None
    context = error.__context__
    while context is not None and context is not error and _began_inside(context):
        context = context.__context__
    if context is not error:
        error.__context__ = context
        if error.__cause__ is None:
            error.__suppress_context__ = False  # the context is now the error that the user's code was handling


def _began_inside(error: BaseException) -> bool:
    """Return True if this package or PyTorch caught an error: the first frame of its traceback is theirs."""
    trace = error.__traceback__
    return trace is None or _is_own(trace.tb_frame) or _package(trace.tb_frame) == "torch"
