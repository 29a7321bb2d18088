"""What must not be left half done when somebody presses Ctrl-C: what is recorded is taken and sent, or neither.

Where an interrupt came in between, values would be waited for that no executor was told to make; of a program for several executors,
some would wait for values that others were never told to send.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Undivided:
    """Context manager, reentrant: an interrupt waits until what has begun is done. A second one does not wait."""

    def __init__(self) -> None:
        self._depth = 0  # of the main thread, which alone is interrupted
        self._before: Any = None
        self._caught: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._depth:
            self._before = signal.getsignal(signal.SIGINT)
            if callable(self._before):
                signal.signal(signal.SIGINT, self._catch)
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth or not callable(self._before):
            return
        signal.signal(signal.SIGINT, self._before)
        caught, self._caught = self._caught, None
        if caught is not None:
            self._before(*caught)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self._caught is not None:
            self._before(number, frame)
        self._caught = number, frame


undivided = Undivided()
