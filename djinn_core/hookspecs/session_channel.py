"""Session channels: the connection of a session, which may survive a broken transport connection, and the client's end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

from djinn_core.hookspecs.transports import Connection, Frame, Limits, LinkFacts
from djinn_core.wire.messages import Attached


class SessionChannel(Connection):
    """A connection that may use the memory of sent frames until `copy_borrowed` is called, and that may continue over another connection after a break."""

    @abstractmethod
    def copy_borrowed(self) -> None:
        """Copy sent frames whose memory is still used, because it is about to change."""

    @abstractmethod
    def expire(self) -> None:
        """Allow no further connection. The current one continues."""


class WrappedConnection(SessionChannel):
    """Base of session channels over another connection, whose properties it passes on."""

    def __init__(self, inner: Connection) -> None:
        self._inner = inner

    def place_bodies(self, place: Callable[[bytes, int], memoryview | None]) -> None:
        """As `Connection.place_bodies`."""
        self._inner.place_bodies(place)

    def descriptor(self) -> int | None:
        """As `Connection.descriptor`."""
        return self._inner.descriptor()

    @property
    def bytes_sent(self) -> int:
        """As `Connection.bytes_sent`."""
        return self._inner.bytes_sent

    @property
    def bytes_received(self) -> int:
        """As `Connection.bytes_received`."""
        return self._inner.bytes_received

    @property
    def held(self) -> int:
        """As `Connection.held`."""
        return self._inner.held

    @property
    def peer(self) -> str:
        """As `Connection.peer`."""
        return self._inner.peer

    @property
    def certificate(self) -> bytes:
        """As `Connection.certificate`."""
        return self._inner.certificate

    @property
    def link(self) -> LinkFacts:
        """As `Connection.link`."""
        return self._inner.link


class PlainChannel(WrappedConnection):
    """`SessionChannel` over a single connection: the session ends with the connection. It keeps no sent frames."""

    @property
    def limits(self) -> Limits:
        """As `Connection.limits`."""
        return self._inner.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._inner.limits = limits

    def send(self, frame: Frame) -> None:
        """As `Connection.send`."""
        self._inner.send(frame)

    def receive(self, timeout: float | None = None) -> Frame:
        """As `Connection.receive`."""
        return self._inner.receive(timeout)

    def close(self) -> None:
        """As `Connection.close`."""
        self._inner.close()

    def copy_borrowed(self) -> None:
        """As `SessionChannel.copy_borrowed`: there is nothing to copy."""

    def expire(self) -> None:
        """As `SessionChannel.expire`: there is no further connection."""


class Reconnection(Protocol):
    """Connects to the executor that has a session. `instance`: the process of the last connection."""

    instance: str

    def __call__(self, received: int, seconds: float) -> tuple[Connection, int]:
        """Reconnect. Return a connection that continues the session, and the number of frames that the executor has received.

        `received`: number of frames that this end has received.

        Raises:
            AccessRefused: the session is over.
            DjinnError: no connection is possible within `seconds`.
        """

    def parallel_connection(self, group: bytes) -> Connection:
        """Return a connection parallel to the session's, which the executor knows as one of `group`.

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

    The properties have defaults. A subclass may override one with an attribute that it declares in its class.
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
        """Reply of the executor that has taken over the session. None: the first executor still has it."""
        return None

    @property
    def reconnection(self) -> Reconnection | None:
        """Reconnection to the executor after a break; None if there is none."""
        return None

    def limit_reconnect_seconds(self, patience: float) -> None:
        """Limit reconnection to `patience` seconds, unless the current limit is lower."""

    def call_when_resumed(self, resumed: Callable[[float], None]) -> None:
        """Call `resumed` after each reconnection, with the seconds without a connection."""


class PlainClientChannel(PlainChannel, ClientChannel):
    """Implements `ClientChannel` over a single connection. The session is lost with the connection."""
