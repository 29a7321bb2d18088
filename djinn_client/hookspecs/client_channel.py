"""The client's end of a session's channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from djinn_core.hookspecs.session_channel import PlainChannel, SessionChannel
from djinn_core.hookspecs.transports import Connection
from djinn_core.wire.messages import Attached


class Reconnection(Protocol):
    """Function that connects to the executor that has a session.

    Attributes:
        instance: id of the executor process of the last connection.
    """

    instance: str

    def __call__(self, received: int, seconds: float) -> tuple[Connection, int]:
        """Reconnect. Return a connection that continues the session, and the number of frames that the executor has received.

        `received`: number of frames that this end has received.

        Raises:
            AccessRefused: the session is over.
            DjinnError: no connection is possible within `seconds`.
        """

    def parallel_connection(self, group: bytes) -> Connection:
        """Return a connection parallel to the session's connection. The executor knows it as a member of `group`.

        Raises:
            DjinnError: no connection is possible.
        """

    def control_channel(self) -> Connection:
        """Return a control channel of the session.

        Raises:
            DjinnError: no connection is possible at present.
        """


class ClientChannel(SessionChannel):
    """The client's end of a session's channel. By default its session is lost with the connection.

    The properties have defaults. A subclass may override a property with an attribute that the subclass declares.
    """

    @property
    def crashes_executors(self) -> bool:
        """True if the session crashes executors, so that another executor would crash as well."""
        return False

    @property
    def logged(self) -> bool:
        """True if sent frames are logged to be replayed on another server. Values between executors then pass through the client, too."""
        return False

    @property
    def successor(self) -> Attached | None:
        """Reply of the executor that has taken over the session, or None if the first executor still has the session."""
        return None

    @property
    def reconnection(self) -> Reconnection | None:
        """Function that reconnects to the executor after a break, or None if the session ends with its connection."""
        return None

    def limit_reconnect_seconds(self, patience: float) -> None:
        """Limit reconnection to `patience` seconds, unless the current limit is lower."""

    def call_when_resumed(self, callback: Callable[[float], None]) -> None:
        """Call `callback` after each reconnection, with the number of seconds that the connection was down."""


class PlainClientChannel(PlainChannel, ClientChannel):
    """A client channel over a single connection. The session is lost with the connection."""
