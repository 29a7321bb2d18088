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

_IMPORT_SECONDS = 5.0  # limit in seconds for threads that import modules
_SWITCH_SECONDS = 0.02  # time in seconds in which every waiting thread gets the GIL at least once
_shutdown: Final = threading.Event()
_RUNNING_SECONDS = 2.0  # limit in seconds for threads that do not stop, such as those that use no tensor


def begin() -> None:
    """Begin the shutdown: only the main thread continues."""
    _shutdown.set()
    taps.at_shutdown = True
    taps.update()


def await_threads() -> None:
    """Wait until each other thread is inside an op, or has left code that must not be stopped, such as a module import."""
    if threading.active_count() == 1:
        return
    deadline = time.monotonic() + _IMPORT_SECONDS
    while collect_later.busy and time.monotonic() < deadline:
        time.sleep(_SWITCH_SECONDS)
    _await_other_threads(time.monotonic() + _RUNNING_SECONDS)


def _await_other_threads(deadline: float) -> None:
    """Wait until no other thread has run for `_SWITCH_SECONDS`, or until `deadline` on the monotonic clock.

    A thread that waits for the GIL wakes up several times in this time.
    """
    native_ids = [thread.native_id for thread in threading.enumerate() if thread is not threading.main_thread()]
    numbers = [number for number in native_ids if number is not None]
    last_activity: tuple[str, ...] | None = None
    while True:
        activity = thread_activity(numbers)
        if (activity == last_activity and RUNNING not in activity) or time.monotonic() > deadline:
            return
        last_activity = activity
        time.sleep(_SWITCH_SECONDS)


def has_begun() -> bool:
    """Return True if the interpreter is shutting down."""
    return _shutdown.is_set()


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
        if _shutdown.is_set() and isinstance(error, DjinnError):
            block_unless_main()


suppress_at_shutdown: Final = _SuppressAtShutdown()


def block_unless_main() -> None:
    """Return on the main thread. Block forever on any other thread."""
    if threading.current_thread() is not threading.main_thread():
        threading.Event().wait()
