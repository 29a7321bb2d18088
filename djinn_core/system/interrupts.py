"""Masking of Ctrl-C: inside a mask an interrupt stays pending until the code can handle it.

Python runs signal handlers between any two steps of the main thread. In a submission, this could lose a reply that was
just read, or leave values that no executor was asked to compute. So the code that talks to executors masks interrupts.
This code delivers a pending interrupt itself: a few times per second in every wait, and during planning.
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

LOOK_SECONDS: Final = 0.1  # seconds between checks for a pending interrupt during a wait
_SIGINT: Final = int(signal.SIGINT)
_NEAR: Final = 6  # frames to search for a finalizer
# Callbacks of weak dictionaries and sets for dead keys, with their files; torch._dynamo has a similar list.
_WEAK: Final = ("remove", "_remove", "_remove_id", "<lambda>")
_WEAK_FILES: Final = (weakref.__file__, _weakrefset.__file__, str(Path("torch", "_dynamo", "utils.py")))


class InterruptMask:
    """Context manager inside which Ctrl-C on the main thread stays pending until `check` or the end.

    Reentrant, for all threads.

    Masked sections are short, or call `check` every `LOOK_SECONDS`. Only the main thread is ever interrupted; other
    threads pass through.

    Attributes:
        depth: nesting depth of the main thread. Above 0, Ctrl-C is masked already, so callers may skip entering.
        caught: signal and frame of a pending interrupt; None if no interrupt is pending.
        main: identity of the main thread.
        uninterruptible: reentrant context manager in which not even `check` delivers interrupts.
    """

    def __init__(self) -> None:
        self.uninterruptible = _Uninterruptible(self)
        self.main = _MAIN_IDENT
        self.depth = 0
        self._former_handler: Any = None
        self._catches = False  # True if `_former_handler` is a handler, False if interrupts are ignored
        self._has_own_handler = (
            False  # True if the handler is `raise_outside_torch`, which calls `takes` and needs no exchange
        )
        self.caught: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if get_ident() != _MAIN_IDENT:
            return
        if not self.depth:
            self._former_handler = before = _signal.getsignal(_SIGINT)
            self.caught = None
            self._has_own_handler = before is raise_outside_torch
            if self._has_own_handler:  # as mostly
                self._catches = True
            else:
                self._exchange(before)
        self.depth += 1

    def _exchange(self, before: Any) -> None:
        if before is signal.default_int_handler:  # notebooks reset it for each cell
            self._former_handler = before = raise_outside_torch
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
        if not self._has_own_handler:
            _signal.signal(_SIGINT, self._former_handler)
        if self.caught is not None:
            self._deliver()

    @property
    def pending(self) -> bool:
        """True if this thread was interrupted and the interrupt was not delivered yet."""
        return self.caught is not None and get_ident() == _MAIN_IDENT

    def check(self) -> None:
        """Deliver a pending interrupt now.

        Raises:
            KeyboardInterrupt: Ctrl-C came, and the program does not handle it otherwise. Not inside `uninterruptible`.
        """
        if self.caught is not None and not self.uninterruptible.depth and get_ident() == _MAIN_IDENT:
            self._deliver()

    def ignore(self) -> None:
        """Mask interrupts permanently, in a process that always ignores them."""
        self.depth += 1

    def put_back(self) -> None:
        """Make a raised and caught `KeyboardInterrupt` pending again. The next check raises it."""
        if get_ident() == _MAIN_IDENT and self.depth:
            self.caught = signal.SIGINT, None

    @contextmanager
    def unmasked(self) -> Iterator[None]:
        """Deliver interrupts at any point of the block. Inside `uninterruptible`, the caller must catch them."""
        if get_ident() != _MAIN_IDENT or not self.depth or not self._catches:
            yield
            return
        own = self._has_own_handler
        try:
            if own:
                self._has_own_handler = False
            else:
                signal.signal(signal.SIGINT, self._former_handler)
            self._deliver()
            yield
        finally:
            if own:
                self._has_own_handler = True
            else:
                signal.signal(signal.SIGINT, self._catch)

    def takes(self, number: int, frame: FrameType | None) -> bool:
        """Make an interrupt pending for this module's handler. Return False if the handler must raise the interrupt."""
        if not self.depth or not self._has_own_handler:
            return False
        self.caught = number, frame
        return True

    def _deliver(self) -> None:
        caught, self.caught = self.caught, None
        if caught is not None:
            if self._has_own_handler:
                _raise(*caught, at_signal=False)
            else:
                self._former_handler(*caught)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.caught = number, frame


class _Uninterruptible:
    """Context manager of `InterruptMask.uninterruptible`.

    Attributes:
        depth: nesting depth of the main thread.
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
    """A reentrant lock. A `with` statement that waits for it raises pending interrupts."""

    __slots__ = ()

    def __enter__(self) -> bool:  # type: ignore[override] # without arguments, as `with` calls it
        while not self.acquire(timeout=LOOK_SECONDS):
            interrupt_mask.check()
        return True


def raise_outside_torch(number: int, frame: FrameType | None) -> None:
    """Signal handler of Ctrl-C that replaces Python's: raise `KeyboardInterrupt`, but later if PyTorch could not handle it now.

    PyTorch asks Python for a tensor's device even in code in which a C++ exception aborts the process, and Python
    checks for signals then. So inside PyTorch's C++ code, the handler sends the signal again. It also sends it again in
    code whose exceptions Python ignores. `InterruptMask` calls this from Python after the signal, without C++ in
    between.
    """
    if _is_handling(frame):
        return  # the pending decision covers this signal, too
    if not interrupt_mask.takes(number, frame):
        _raise(number, frame, at_signal=frame is sys._getframe(1))  # noqa: SLF001 - the public ways build a list of all frames


def _raise(number: int, frame: FrameType | None, at_signal: bool) -> None:
    if (at_signal and native_stack.is_on_stack(b"libtorch")) or _is_dropped(frame):
        _thread.start_new_thread(_resend_interrupt, ())
    else:
        signal.default_int_handler(number, frame)


def warn_without_lock() -> None:
    """Warn that Djinn needs the GIL if a free-threaded Python runs without it."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        warnings.warn(
            "Djinn does not support Python without the GIL: threads may see inconsistent data. Set PYTHON_GIL=1, "
            "or use a build of Python with the GIL",
            RuntimeWarning,
            stacklevel=2,
        )


def handle_interrupts() -> None:
    """Install `raise_outside_torch`, unless the program handles interrupts itself."""
    if threading.current_thread() is _main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, raise_outside_torch)


def _is_handling(frame: FrameType | None) -> bool:
    """Return True if a signal arrived while this handler was running."""
    while frame is not None and frame.f_code.co_filename == __file__:
        if frame.f_code is raise_outside_torch.__code__ or frame.f_code is _raise.__code__:
            return True
        frame = frame.f_back
    return False


def _is_dropped(frame: FrameType | None) -> bool:
    """Return True inside finalizers and weak reference callbacks, whose exceptions Python ignores."""
    for _ in range(_NEAR):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_name == "__del__" or (code.co_name in _WEAK and code.co_filename.endswith(_WEAK_FILES)):
            return True
        frame = frame.f_back
    return False


def _resend_interrupt() -> None:
    time.sleep(_AGAIN_SECONDS)
    if _main.is_alive():
        signal_main_thread(signal.SIGINT)


_AGAIN_SECONDS: Final = 0.002


_main = threading.main_thread()
_MAIN_IDENT: Final = _main.ident  # also in a forked child
interrupt_mask = InterruptMask()


# Free stack depth. Near Python's recursion limit any call raises `RecursionError`, even the release of a lock. A lock
# that stays held blocks the session forever. So code that takes locks or numbers messages starts only if it can finish.
LEVELS: Final = 150  # frames for sending, receiving, and errors on their way out


def require_stack_room() -> None:
    """Raise `RecursionError` if fewer than `LEVELS` further calls can be nested.

    Callers check this before they begin.
    """
    try:
        # Calls of C functions count as well but have no frame: a stack may be full with a third of the frames.
        sys._getframe(sys.getrecursionlimit() // 3)  # noqa: SLF001 - the only way to see how deep it is without a walk
    except ValueError:
        return
    _nest_calls(LEVELS)


def _nest_calls(count: int) -> None:
    if count:
        _nest_calls(count - 1)
