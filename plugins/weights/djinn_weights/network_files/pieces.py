"""Read a file in concurrent pieces, because one connection seldom uses all of the bandwidth."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Final

PIECE: Final = 8 << 20  # maximum bytes of a read
READERS: Final = 8  # number of concurrent reads


class Pieces:
    """Threads that read pieces of files. Thread-safe."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def read(self, start: int, buffer: memoryview, read: Callable[[int, memoryview], None]) -> None:
        """Fill `buffer` by concurrent calls of `read(start, part_of_buffer)`. `start`: offset in the file, in bytes.

        If a call fails, cancel the calls that have not started, wait for the running calls, and raise the first error.
        """
        if len(buffer) <= PIECE:
            read(start, buffer)
            return
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(READERS, "djinn-pieces")
        offsets = range(0, len(buffer), PIECE)
        reads = [self._threads.submit(read, start + offset, buffer[offset : offset + PIECE]) for offset in offsets]
        wait(reads, return_when=FIRST_EXCEPTION)
        for future in reads:
            future.cancel()
        wait(reads)
        for future in reads:
            if not future.cancelled():
                future.result()
