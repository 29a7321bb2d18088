"""Masking of Ctrl-C: inside of a mask an interrupt is pending, and is delivered where the code can bear it.

Python runs the handler of a signal between any two steps of the main thread. Inside of a submission this would lose a reply that
was just read, or leave values to wait for that no executor was told to make. So the code that talks to executors masks
interrupts, and delivers a pending one itself: in every wait, a few times a second, and while a program is planned.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes an enum of every result; handlers change twice in each wait
import _thread
import _weakrefset
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any, Final

from djinn_core.system import native_stack
from djinn_core.system.processes import signal_main_thread

LOOK_SECONDS: Final = 0.1  # between two looks for a pending interrupt during a wait
_SIGINT: Final = int(signal.SIGINT)
_NEAR: Final = 6  # frames that a finalizer may be away
# What weak dictionaries and sets call when a key dies, and the file of each; torch._dynamo has a list of the kind.
_WEAK: Final = ("remove", "_remove", "_remove_id", "<lambda>")
_WEAK_FILES: Final = (weakref.__file__, _weakrefset.__file__, str(Path("torch", "_dynamo", "utils.py")))


class InterruptMask:
    """Context manager, reentrant, for all threads: inside, an interrupt of the main thread is pending until `check`, or the end.

    Masked sections are short, or call `check` every `LOOK_SECONDS`. Only the main thread is ever interrupted; others pass through.

    Attributes:
        depth: how many masked sections the main thread is inside; where it is above 0, no thread has to enter another.
        caught: signal and frame of a pending interrupt; None without one.
        main: the identity of the main thread.
        uninterruptible: context manager, reentrant: inside, a pending interrupt is not delivered at a check either.
    """

    def __init__(self) -> None:
        self.uninterruptible = _Uninterruptible(self)
        self.main = _MAIN_IDENT
        self.depth = 0
        self._before: Any = None
        self._catches = False  # whether `_before` is a handler, and not to ignore interrupts
        self._own = False  # whether the handler is `raise_outside_torch`, which asks `takes` and need not be exchanged
        self.caught: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if get_ident() != _MAIN_IDENT:
            return
        if not self.depth:
            self._before = before = _signal.getsignal(_SIGINT)
            self.caught = None
            self._own = before is raise_outside_torch
            if self._own:  # as mostly
                self._catches = True
            else:
                self._exchange(before)
        self.depth += 1

    def _exchange(self, before: Any) -> None:
        if before is signal.default_int_handler:  # notebooks put it back for each cell
            self._before = before = raise_outside_torch
        self._catches = callable(before)
        if self._catches:
            _signal.signal(_SIGINT, self._catch)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if get_ident() != _MAIN_IDENT:
            return
        self.depth -= 1
        if self.depth or not self._catches:
            return
        if not self._own:
            _signal.signal(_SIGINT, self._before)
        if self.caught is not None:
            self._deliver()

    @property
    def pending(self) -> bool:
        """True if this thread was interrupted and the interrupt was not delivered yet."""
        return self.caught is not None and get_ident() == _MAIN_IDENT

    def check(self) -> None:
        """Deliver a pending interrupt here.

        Raises:
            KeyboardInterrupt: there was an interrupt, unless the program handles them otherwise. Not inside `uninterruptible`.
        """
        if self.caught is not None and not self.uninterruptible.depth and get_ident() == _MAIN_IDENT:
            self._deliver()

    def ignore(self) -> None:
        """Mask interrupts for good, in a process that ignores them from its start to its end."""
        self.depth += 1

    def put_back(self) -> None:
        """Make a `KeyboardInterrupt` that was raised and caught pending again: it is raised at the next check."""
        if get_ident() == _MAIN_IDENT and self.depth:
            self.caught = signal.SIGINT, None

    @contextmanager
    def unmasked(self) -> Iterator[None]:
        """Inside, an interrupt is raised at once, wherever it comes; inside `uninterruptible`, the caller catches it."""
        if get_ident() != _MAIN_IDENT or not self.depth or not self._catches:
            yield
            return
        own = self._own
        try:
            if own:
                self._own = False
            else:
                signal.signal(signal.SIGINT, self._before)
            self._deliver()
            yield
        finally:
            if own:
                self._own = True
            else:
                signal.signal(signal.SIGINT, self._catch)

    def takes(self, number: int, frame: FrameType | None) -> bool:
        """Make an interrupt pending for the handler of this module; False if the handler is to raise it."""
        if not self.depth or not self._own:
            return False
        self.caught = number, frame
        return True

    def _deliver(self) -> None:
        caught, self.caught = self.caught, None
        if caught is not None:
            if self._own:
                _raise(*caught, at_signal=False)
            else:
                self._before(*caught)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.caught = number, frame


class _Uninterruptible:
    """Context manager of `InterruptMask.uninterruptible`.

    Attributes:
        depth: how often the main thread is inside.
    """

    def __init__(self, mask: InterruptMask) -> None:
        self.depth = 0
        self._mask = mask

    def __enter__(self) -> None:
        if get_ident() == _MAIN_IDENT:
            if self._mask.depth:
                self._mask.depth += 1
            else:
                self._mask.__enter__()
            self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if get_ident() == _MAIN_IDENT:
            self.depth -= 1
            if self._mask.depth > 1:
                self._mask.depth -= 1
            else:
                self._mask.__exit__(kind, error, trace)


class InterruptibleLock(_thread.RLock):  # type: ignore[misc] # not final, and its `__exit__` is no step of Python's
    """A reentrant lock; while a `with` statement waits for it, pending interrupts are raised."""

    __slots__ = ()

    def __enter__(self) -> bool:  # type: ignore[override] # without arguments, as `with` calls it
        while not self.acquire(timeout=LOOK_SECONDS):
            interrupt_mask.check()
        return True


def raise_outside_torch(number: int, frame: FrameType | None) -> None:
    """The handler of Ctrl-C, in place of Python's own: raises `KeyboardInterrupt`, a moment later where PyTorch could not bear it.

    PyTorch asks Python for the device of a tensor, also where an exception in C++ aborts the process, and Python then looks
    for signals. So inside PyTorch's C++ the signal is sent once more instead, and where Python drops what is raised.
    `InterruptMask` calls this later than at the signal, from Python: there is no C++ between.
    """
    if _is_handling(frame):
        return  # what is just being decided holds for this one, too
    if not interrupt_mask.takes(number, frame):
        _raise(number, frame, at_signal=frame is sys._getframe(1))  # noqa: SLF001 - the public ways build a list of all frames


def _raise(number: int, frame: FrameType | None, at_signal: bool) -> None:
    if (at_signal and native_stack.stands_between(b"libtorch")) or _is_dropped(frame):
        _thread.start_new_thread(_press_again, ())
    else:
        signal.default_int_handler(number, frame)


def warn_without_lock() -> None:
    """Say that Djinn relies on the interpreter's lock, where a free-threaded Python runs without it."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        warnings.warn(
            "Djinn was not written for Python without its global lock: what one thread does in one step, others may see half done. "
            "Set PYTHON_GIL=1, or use a build of Python with the lock",
            RuntimeWarning,
            stacklevel=2,
        )


def handle_interrupts() -> None:
    """Use `raise_outside_torch` from now on, unless the program handles interrupts itself."""
    if threading.current_thread() is _main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, raise_outside_torch)


def _is_handling(frame: FrameType | None) -> bool:
    """True if a signal arrived while this handler ran."""
    while frame is not None and frame.f_code.co_filename == __file__:
        if frame.f_code is raise_outside_torch.__code__ or frame.f_code is _raise.__code__:
            return True
        frame = frame.f_back
    return False


def _is_dropped(frame: FrameType | None) -> bool:
    """True in a finalizer, and in what weak dictionaries and sets do when a key dies: Python ignores exceptions of these."""
    for _ in range(_NEAR):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_name == "__del__" or (code.co_name in _WEAK and code.co_filename.endswith(_WEAK_FILES)):
            return True
        frame = frame.f_back
    return False


def _press_again() -> None:
    time.sleep(_AGAIN_SECONDS)
    if _main.is_alive():
        signal_main_thread(signal.SIGINT)


_AGAIN_SECONDS: Final = 0.002


_main = threading.main_thread()
_MAIN_IDENT: Final = _main.ident  # the same in a forked child
interrupt_mask = InterruptMask()


# Room on the stack. Near Python's limit of recursion any call raises `RecursionError`, the release of a lock as well. A lock that stays taken
# stops the session for ever, so what takes locks and numbers messages begins only where it can go on to its end.
LEVELS: Final = 150  # that sending and receiving take, and errors on their way out


def require_stack_room() -> None:
    """Raise `RecursionError` where fewer than `LEVELS` calls can be nested here; nothing has been done then."""
    try:
        # Calls of C functions count as well, and have no frame: a stack with a third of the frames may be full.
        sys._getframe(sys.getrecursionlimit() // 3)  # noqa: SLF001 - the only way to see how deep it is without a walk
    except ValueError:
        return
    _descend(LEVELS)


def _descend(levels: int) -> None:
    if levels:
        _descend(levels - 1)
