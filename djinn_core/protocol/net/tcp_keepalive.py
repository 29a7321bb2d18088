"""Monitor that ends TCP connections to dead machines, even while bytes are in flight.

The kernel probes an idle connection (keep-alive), but retransmits for a quarter of an hour while bytes are in flight.
The monitor ends a connection if the other machine has acknowledged nothing for a minute. If a program does not read,
for example in a debugger, the kernel of its machine still acknowledges. So such a machine never counts as dead. A
connection also ends when this machine has lost the connection's own address.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Final, Protocol

PAUSE_SECONDS: Final = 10.0
SILENT_SECONDS: Final = 60.0


class WatchedConnection(Protocol):
    """A connection over a network."""

    def notice_silence(self) -> None:
        """End the connection if the other machine or the connection's own address is gone; never blocks, never raises."""


class PeerMonitor:
    """Check TCP connections periodically, on one thread for all. A connection is watched while it is referenced."""

    def __init__(self) -> None:
        self._connections: weakref.WeakSet[WatchedConnection] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __contains__(self, connection: WatchedConnection) -> bool:
        return connection in self._connections

    def watch(self, connection: WatchedConnection) -> None:
        """Watch `connection`, too."""
        with self._lock:
            self._connections.add(connection)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="djinn-peers", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(PAUSE_SECONDS)
            with self._lock:
                due = list(self._connections)
            while due:
                due.pop().notice_silence()


peer_monitor: Final = PeerMonitor()
