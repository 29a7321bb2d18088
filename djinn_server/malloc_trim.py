"""Return freed memory to the system after a connection has ended, by garbage collection and `malloc_trim`.

The C library caches freed memory in as many arenas as there were concurrent threads. Python collects reference cycles
rarely, so buffers of connections and programs of sessions stay allocated. Without trimming, a server keeps tens of
megabytes of unused memory after a thousand clients.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable
from typing import Final

from djinn_core.logs import get_logger
from djinn_server.system import memory

DELAY_SECONDS: Final = 2.0  # between the end of a connection and the trim
_ARENAS: Final = 2
_CACHED_BYTES: Final = 128 << 20  # of freed memory that the allocator may cache for the next runs
_log = get_logger("djinn.server")


@functools.cache
def trimmer() -> Callable[[], object]:
    """Return a function that returns freed memory to the system, if the C library can."""
    try:
        return memory.trimmer()
    except OSError as error:
        _log.info("cannot return freed memory to the system: it stays with this process", reason=str(error))
        return lambda: None


def keep_few_arenas() -> None:
    """Let all threads share a few malloc arenas, so that sessions can reuse each other's freed memory.

    Use this only in processes whose threads mostly wait for Python's global lock.
    """
    memory.keep_few_arenas(_ARENAS)


def keep_freed_for_next_run() -> None:
    """Let the allocator keep memory that runs have freed, for later runs, until `MemoryTrimmer` acts."""
    memory.keep_freed(_CACHED_BYTES)


def freeze_startup_objects() -> None:
    """Exclude all existing objects, mostly of imported libraries, from garbage collection, and enable it.

    A collection of these objects would take 0.2 s.
    """
    gc.freeze()
    gc.enable()


class MemoryTrimmer:
    """Trim memory in a separate thread, once for all connections that end within `delay` seconds."""

    def __init__(self, delay: float = DELAY_SECONDS) -> None:
        self._delay = delay
        self._is_requested = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def soon(self) -> None:
        """Schedule a trim; return at once."""
        self._is_requested.set()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="djinn-memory-trimmer", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while self._is_requested.wait():
            time.sleep(self._delay)
            self._is_requested.clear()
            gc.collect()
            trimmer()()
