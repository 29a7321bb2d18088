"""Return freed memory to the system (by `malloc_trim` and garbage collection) some time after a connection has ended.

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

PAUSE_SECONDS: Final = 2.0
_ARENAS: Final = 2
_KEPT_BYTES: Final = 128 << 20  # of memory freed by an executor's programs, for the next runs
_log = get_logger("djinn.server")


@functools.cache
def trimmer() -> Callable[[], object]:
    """Return a function that returns freed memory to the system. If the C library cannot, it does nothing."""
    try:
        return memory.trimmer()
    except OSError as error:
        _log.info("freed memory stays with this process", reason=str(error))
        return lambda: None


def keep_few_arenas() -> None:
    """Let threads share malloc arenas. With one arena per thread, a session cannot reuse memory that another one freed.

    Use this only in processes whose threads mostly wait for Python's lock.
    """
    memory.keep_few_arenas(_ARENAS)


def keep_freed_for_next_run() -> None:
    """Let the allocator keep memory that a run has freed, as the next run needs it. `MemoryTrimmer` returns it."""
    memory.keep_freed(_KEPT_BYTES)


def set_start_aside() -> None:
    """Exclude all existing objects, mostly of imported libraries, from garbage collection, and enable it.

    A collection of these objects would take 0.2 s.
    """
    gc.freeze()
    gc.enable()


class MemoryTrimmer:
    """Trim memory in a separate thread, once for all connections that end within a few seconds."""

    def __init__(self, pause: float = PAUSE_SECONDS) -> None:
        self._pause = pause
        self._wanted = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def soon(self) -> None:
        """Schedule a trim; return at once."""
        self._wanted.set()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="djinn-memory-trimmer", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while self._wanted.wait():
            time.sleep(self._pause)
            self._wanted.clear()
            gc.collect()
            trimmer()()
