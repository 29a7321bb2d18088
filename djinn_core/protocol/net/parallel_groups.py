"""Parallel connections that clients have opened, before a frame on the session's connection names them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from djinn_core.errors import TransportError
from djinn_core.hookspecs.transports import Connection
from djinn_core.protocol.net.striping import StripingConnection
from djinn_core.settings import PARALLEL_CONNECTIONS_LIMIT

_NAMING_SECONDS: Final = 30.0
_Key = tuple[str, bytes]


class ParallelGroups:
    """Groups of parallel connections, by session and client-chosen name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unclaimed: dict[_Key, list[StripingConnection]] = {}

    def accept_for(self, connection: Connection, session: str) -> None:
        """Let a session's client join groups of parallel connections to `connection`, if the transport can stripe."""
        if isinstance(connection, StripingConnection):
            connection.accept_parallel(partial(self.claim, session))

    def serve(self, connection: Connection, session: str, group: bytes, welcome: Callable[[], None]) -> str:
        """Use a connection for large buffers of a session until it ends.

        Return the reason if the connection cannot be used, or an empty string.

        `welcome` is called to tell the client that the connection is in use.
        """
        if not isinstance(connection, StripingConnection):
            return "the transport does not support parallel connections"
        if not self._add(session, group, connection):
            return f"a session has at most {PARALLEL_CONNECTIONS_LIMIT} parallel connections"
        try:
            welcome()
        except TransportError:
            connection.close()  # which `_await_end` notices
        self._await_end(session, group, connection)
        return ""

    def _add(self, session: str, group: bytes, connection: StripingConnection) -> bool:
        """Add a connection to a group; return False if there are too many."""
        with self._lock:
            count = sum(len(connections) for (name, _), connections in self._unclaimed.items() if name == session)
            if count >= PARALLEL_CONNECTIONS_LIMIT:
                return False
            self._unclaimed.setdefault((session, group), []).append(connection)
            return True

    def claim(self, session: str, group: bytes) -> Sequence[StripingConnection]:
        """Remove and return the connections of a group. Return an empty sequence for an unknown group."""
        with self._lock:
            return self._unclaimed.pop((session, group), ())

    def _await_end(self, session: str, group: bytes, connection: StripingConnection) -> None:
        """Wait until a connection has ended, or `_NAMING_SECONDS` have passed without a frame that names its group."""
        if connection.await_end(_NAMING_SECONDS):
            self._forget(session, group, connection)
        elif not self._forget(session, group, connection):
            connection.await_end()

    def _forget(self, session: str, group: bytes, connection: StripingConnection) -> bool:
        """Remove a connection that no frame has claimed. Return False if it was claimed or removed before."""
        with self._lock:
            connections = self._unclaimed.get((session, group), [])
            if connection not in connections:
                return False
            connections.remove(connection)
            if not connections:
                del self._unclaimed[session, group]
            return True
