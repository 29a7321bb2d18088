"""Interpreter shutdown, which stops daemon threads when they next acquire the GIL.

Stopping a thread inside an op unwinds PyTorch's C++ frames. This aborts the process (`terminate called without an
active exception`). So at shutdown, every non-main thread inside an op blocks there without the GIL until the process
ends. The main thread first waits until threads between two ops have entered their next op.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final

from djinn_client.interception.tap import taps
from djinn_core.errors import DjinnError
from djinn_core.system.gc_pause import collect_later
from djinn_core.system.processes import RUNNING, thread_activity

_PATIENCE = 5.0  # seconds
_A_TURN = 0.02  # seconds in which every thread gets the GIL once
_ending: Final = threading.Event()
_RUNNING_SECONDS = 2.0  # limit in seconds for threads that do not stop, such as those that use no tensor


def begin() -> None:
    """Begin the shutdown: only the main thread continues."""
    _ending.set()
    taps.at_shutdown = True
    taps.update()


def settle() -> None:
    """Wait until each other thread is inside an op, or has left code that must not be stopped, such as a module import."""
    if threading.active_count() == 1:
        return
    deadline = time.monotonic() + _PATIENCE
    while collect_later.busy and time.monotonic() < deadline:
        time.sleep(_A_TURN)
    _await_rest(time.monotonic() + _RUNNING_SECONDS)


def _await_rest(deadline: float) -> None:
    """Wait until no other thread has run for one turn (Python's switch interval).

    A thread that waits for the GIL wakes up several times per turn.
    """
    others = [thread.native_id for thread in threading.enumerate() if thread is not threading.main_thread()]
    numbers = [number for number in others if number is not None]
    before: tuple[str, ...] | None = None
    while True:
        now = thread_activity(numbers)
        if (now == before and RUNNING not in now) or time.monotonic() > deadline:
            return
        before = now
        time.sleep(_A_TURN)


def has_begun() -> bool:
    """Return True if the interpreter is shutting down."""
    return _ending.is_set()


class _SuppressAtShutdown:
    """Context manager that suppresses errors in a block that waits for an executor, at shutdown.

    The session has ended by then, so such errors are expected. All threads share one object.
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.at(error)

    def at(self, error: BaseException) -> None:
        """Handle `error` like the context manager, for code without a `with` block.

        If the error is suppressed, this does not return.
        """
        if _ending.is_set() and isinstance(error, DjinnError):
            stay_unless_main()


suppress_at_shutdown: Final = _SuppressAtShutdown()


def stay_unless_main() -> None:
    """Return on the main thread. Block forever on any other thread."""
    if threading.current_thread() is not threading.main_thread():
        threading.Event().wait()
