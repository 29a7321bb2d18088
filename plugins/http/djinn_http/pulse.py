"""Thread that sends periodic messages over idle connections, so that servers and proxies keep them open."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Final, Protocol

PULSE_SECONDS: Final = 5.0


class Pulsed(Protocol):
    """A connection that needs periodic calls."""

    def pulse(self) -> None:
        """Send a message if the connection needs one to stay open. Must neither block nor raise."""


_connections: weakref.WeakSet[Pulsed] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def keep_alive(connection: Pulsed) -> None:
    """Call `connection.pulse()` every `PULSE_SECONDS` while the connection is referenced."""
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
