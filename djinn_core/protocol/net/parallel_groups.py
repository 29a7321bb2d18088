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
        self._waiting: dict[_Key, list[StripingConnection]] = {}

    def accept_for(self, connection: Connection, session: str) -> None:
        """Let the client of a session name the groups that it uses beside `connection`, if the transport can stripe."""
        if isinstance(connection, StripingConnection):
            connection.accept_parallel(partial(self.take, session))

    def serve(self, connection: Connection, session: str, group: bytes, welcome: Callable[[], None]) -> str:
        """Use a connection for large buffers of a session until it ends.

        Return the reason if that is not possible, else "".

        `welcome`: called to tell the client that the connection is in use.
        """
        if not isinstance(connection, StripingConnection):
            return "the transport does not support parallel connections"
        if not self._add(session, group, connection):
            return f"a session has at most {PARALLEL_CONNECTIONS_LIMIT} parallel connections"
        try:
            welcome()
        except TransportError:
            connection.close()  # which `_attend` sees
        self._attend(session, group, connection)
        return ""

    def _add(self, session: str, group: bytes, connection: StripingConnection) -> bool:
        """Add a connection to a group; return False if there are too many."""
        with self._lock:
            of_session = sum(len(found) for (name, _), found in self._waiting.items() if name == session)
            if of_session >= PARALLEL_CONNECTIONS_LIMIT:
                return False
            self._waiting.setdefault((session, group), []).append(connection)
            return True

    def take(self, session: str, group: bytes) -> Sequence[StripingConnection]:
        """Remove and return the connections of a group; empty if there is no such group."""
        with self._lock:
            return self._waiting.pop((session, group), ())

    def _attend(self, session: str, group: bytes, connection: StripingConnection) -> None:
        """Wait until a connection of a group has ended. A connection that no frame names times out."""
        if connection.await_end(_NAMING_SECONDS):
            self._forget(session, group, connection)
        elif not self._forget(session, group, connection):
            connection.await_end()

    def _forget(self, session: str, group: bytes, connection: StripingConnection) -> bool:
        """Remove a waiting connection; return False if it was no longer waiting."""
        with self._lock:
            waiting = self._waiting.get((session, group), [])
            if connection not in waiting:
                return False
            waiting.remove(connection)
            if not waiting:
                del self._waiting[session, group]
            return True
