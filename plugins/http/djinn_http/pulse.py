"""A thread that looks after idle connections, so that servers and proxies do not take their owners for dead."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Final, Protocol

PULSE_SECONDS: Final = 5.0


class Pulsed(Protocol):
    """Something that wants a call now and then."""

    def pulse(self) -> None:
        """Do what is due; never block, never raise."""


_connections: weakref.WeakSet[Pulsed] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def keep_alive(connection: Pulsed) -> None:
    """Call `connection.pulse()` every few seconds for as long as the connection is referenced."""
    global _thread
    with _lock:
        _connections.add(connection)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="djinn-http-pulse", daemon=True)
            _thread.start()


def _run() -> None:
    while True:
        time.sleep(PULSE_SECONDS)
        with _lock:
            due = list(_connections)
        while due:
            due.pop().pulse()
