"""Session channels: the connection of a session, which may survive a broken transport connection."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from djinn_core.hookspecs.transports import Connection, Frame, Limits, LinkFacts


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
