"""Long reads in pieces, several at a time: one connection alone seldom fills a network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Final

PIECE: Final = 8 << 20  # bytes
READERS: Final = 8  # pieces that are read at a time


class Pieces:
    """Threads that read pieces. Thread-safe."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def read(self, start: int, buffer: memoryview, read: Callable[[int, memoryview], None]) -> None:
        """Fill `buffer` by calls of `read` for parts of it; the first error of one is raised when none is under way any more."""
        if len(buffer) <= PIECE:
            read(start, buffer)
            return
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(READERS, "djinn-pieces")
        places = range(0, len(buffer), PIECE)
        reading = [self._threads.submit(read, start + at, buffer[at : at + PIECE]) for at in places]
        wait(reading, return_when=FIRST_EXCEPTION)
        for one in reading:
            one.cancel()
        wait(reading)
        for one in reading:
            if not one.cancelled():
                one.result()
