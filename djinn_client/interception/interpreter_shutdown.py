"""Interpreter shutdown, which stops daemon threads wherever they next acquire the GIL.

Stopping one inside an op unwinds PyTorch's C++ frames, which aborts the process (`terminate called without an active exception`). So while
the interpreter ends, every thread but the main one that is inside an op stays there, without the GIL, until the process is gone; and the
main thread waits until those that were between two ops have come to the next one.
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
_A_TURN = 0.02  # seconds in which every thread has its turn
_ending: Final = threading.Event()
_RUNNING_SECONDS = 2.0  # that threads may take that go on, such as those that use no tensor


def begin() -> None:
    """The interpreter ends; only the main thread goes on."""
    _ending.set()
    taps.at_shutdown = True
    taps.update()


def settle() -> None:
    """Wait until the other threads have left what cannot be stopped, such as the import of a module, or are in an op."""
    if threading.active_count() == 1:
        return
    deadline = time.monotonic() + _PATIENCE
    while collect_later.busy and time.monotonic() < deadline:
        time.sleep(_A_TURN)
    _await_rest(time.monotonic() + _RUNNING_SECONDS)


def _await_rest(deadline: float) -> None:
    """Wait until no other thread has run for a turn; one that waits for the GIL wakes up several times in a turn."""
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
    """True if the interpreter is shutting down."""
    return _ending.is_set()


class _SuppressAtShutdown:
    """Context manager, one for all threads: suppresses errors at shutdown in a block that waits for an executor.

    The session has ended then, so they are expected.
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.at(error)

    def at(self, error: BaseException) -> None:
        """For a block without the context manager, when it is left by `error`: does not return where that is suppressed."""
        if _ending.is_set() and isinstance(error, DjinnError):
            stay_unless_main()


suppress_at_shutdown: Final = _SuppressAtShutdown()


def stay_unless_main() -> None:
    """Return on the main thread; on another thread never."""
    if threading.current_thread() is not threading.main_thread():
        threading.Event().wait()
