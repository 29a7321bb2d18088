"""Read a file in parallel pieces, because one connection seldom uses all of the bandwidth."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Final

PIECE: Final = 8 << 20  # in bytes
READERS: Final = 8  # number of concurrent reads


class Pieces:
    """Threads that read pieces of files. Thread-safe."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def read(self, start: int, buffer: memoryview, read: Callable[[int, memoryview], None]) -> None:
        """Fill `buffer` by concurrent calls of `read`. After all calls have ended, raise the first error."""
        if len(buffer) <= PIECE:
            read(start, buffer)
            return
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(READERS, "djinn-pieces")
        places = range(0, len(buffer), PIECE)
        reading = [self._threads.submit(read, start + at, buffer[at : at + PIECE]) for at in places]
        wait(reading, return_when=FIRST_EXCEPTION)
        for future in reading:
            future.cancel()
        wait(reading)
        for future in reading:
            if not future.cancelled():
                future.result()
