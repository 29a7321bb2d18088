"""The client's channel to an executor: what a session needs to know of reconnection and failover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from djinn_core.hookspecs.transports import Connection
from djinn_core.protocol.delivery.session_channel import PlainChannel, SessionChannel
from djinn_core.wire.messages import Attached


class Reconnection(Protocol):
    """Connects to the executor that has a session. `instance`: the process of the last connection."""

    instance: str

    def __call__(self, received: int, seconds: float) -> tuple[Connection, int]:
        """Reconnect: a connection that continues the session, and the number of frames that the executor has received.

        `received`: number of frames that this end has received.

        Raises:
            AccessRefused: the session is over.
            DjinnError: there is none within `seconds`.
        """

    def parallel_connection(self, group: bytes) -> Connection:
        """A connection parallel to that of the session, which the executor knows as one of `group`.

        Raises:
            DjinnError: there is none.
        """

    def control_channel(self) -> Connection:
        """A control channel of the session.

        Raises:
            DjinnError: there is none, for the time being.
        """


class ClientChannel(SessionChannel):
    """The client's end of a session's channel. By default its session is lost with the connection.

    Attributes:
        crashes_executors: True if the session itself crashes executors, so that another one would crash as well.
        logged: True if frames are logged to be replayed on another server. Values between executors then pass through the
            client, to be logged as well.
        successor: reply of the executor that has taken over the session; None while the first one has it.
    """

    crashes_executors: bool = False
    logged: bool = False
    successor: Attached | None = None

    @property
    def reconnection(self) -> Reconnection | None:
        """Reconnection to the executor after a break; None if there is none."""
        return None

    def hasten(self, patience: float) -> None:
        """Stop reconnecting after `patience` seconds, if that is sooner."""

    def call_when_resumed(self, resumed: Callable[[float], None]) -> None:
        """Call `resumed` each time that the session is resumed over another connection, with the seconds in which there was none."""


class PlainClientChannel(PlainChannel, ClientChannel):
    """Implements `ClientChannel` over a single connection: the session is lost with it."""
