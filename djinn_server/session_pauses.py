"""Pauses of a session, during which it needs no thread, and events that end them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import attrs

from djinn_server.recovery.executor_channel import ExecutorChannel

POLL_SECONDS: Final = 0.25  # between polls for a frame while a session also waits for another event
LINGER_SECONDS: Final = 0.5  # for which a session waits for its next frame in the thread that handled the last one
BRIEF_SECONDS: Final = 0.004  # of the longest submission that the leader of `SessionThreads` runs itself
OFFER_SECONDS: Final = 0.001  # after which a brief session lets sessions run that used less device time
MAX_TIMEOUT: Final = 3600.0  # a selector raises OverflowError for more than 24 days


@attrs.frozen
class Pause:
    """A pause of a session.

    Attributes:
        until: end of the pause (`time.monotonic`); None: no end.
        connection: connection whose next frame ends the pause; None: no frame does.
        lingers: True if the session waits for a frame for `LINGER_SECONDS` before its next pause.
        used: result of `MessageHandlers.brief_use` at the pause; None if the session does not wait for a message.
    """

    until: float | None = None
    connection: ExecutorChannel | None = None
    lingers: bool = False
    used: float | None = None


class Wakeup:
    """Callable that ends the pause of a session. Any thread may call it, even before the pause begins.

    Attributes:
        listener: function that the first call after `clear` calls.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.listener: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        """End the current pause, or the next one."""
        if not self._event.is_set():
            self._event.set()
            self.listener()

    @property
    def called(self) -> bool:
        """Return True if this object was called since `clear`."""
        return self._event.is_set()

    def clear(self) -> None:
        """Discard earlier calls, because the session now handles all earlier events."""
        self._event.clear()

    def wait(self, seconds: float | None) -> None:
        """Wait until this object has been called since `clear`, at most `seconds`; None: no limit."""
        self._event.wait(seconds)


def serve_here(pauses: Iterator[Pause], wakeup: Wakeup) -> None:
    """Run a session to its end in the calling thread."""
    for pause in pauses:
        wait_here(pause, wakeup)
        wakeup.clear()


def wait_here(pause: Pause, wakeup: Wakeup) -> None:
    """Wait in the calling thread until a pause ends."""
    seconds = math.inf if pause.until is None else clamp_timeout(pause.until - time.monotonic())
    if pause.connection is not None:
        seconds = 0.0 if pause.lingers else min(seconds, POLL_SECONDS)
    wakeup.wait(None if seconds == math.inf else seconds)


def clamp_timeout(seconds: float) -> float:
    """Return `seconds`, limited to 0 to `MAX_TIMEOUT`. A caller with a later deadline waits again."""
    return min(max(0.0, seconds), MAX_TIMEOUT)
