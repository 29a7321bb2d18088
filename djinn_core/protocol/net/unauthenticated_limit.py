"""Limits of number and age of unauthenticated connections, which have presented neither a token nor a ticket.

If there are too many, the oldest is closed. A client with a token presents it immediately, so its connection is hardly
ever the oldest. Connections are not counted by address, because honest clients may share an address with an attacker.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from djinn_core.logs import get_logger

MAX_CONNECTIONS: Final = 512
_log = get_logger("djinn.transport")


class Closable(Protocol):
    """A connection that any thread can close."""

    def close(self) -> None:
        """Close the connection."""


class UnauthenticatedLimit:
    """The unauthenticated connections of a server, oldest first."""

    def __init__(self, max_connections: int = MAX_CONNECTIONS) -> None:
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._connections: dict[int, Closable] = {}
        self.dropped = 0

    @contextmanager
    def counted(self, connection: Closable) -> Iterator[None]:
        """Context manager: count `connection` as unauthenticated inside the block."""
        with self._lock:
            self._connections[id(connection)] = connection
            oldest = next(iter(self._connections)) if len(self._connections) > self._max_connections else None
            evicted = None if oldest is None else self._connections.pop(oldest)
            self.dropped += evicted is not None
        if evicted is not None:
            _log.warning("too many unauthenticated connections: the oldest was closed", most=self._max_connections)
            evicted.close()
        try:
            yield
        finally:
            with self._lock:
                self._connections.pop(id(connection), None)

    def __len__(self) -> int:
        return len(self._connections)
