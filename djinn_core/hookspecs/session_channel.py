"""Session channels: the connection of a session, which may survive a broken transport connection."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from djinn_core.hookspecs.transports import Connection, Frame, Limits


class SessionChannel(Connection):
    """A connection that survives breaks: it may continue over another connection.

    It may use the memory of sent frames until `copy_borrowed` is called.
    """

    @abstractmethod
    def copy_borrowed(self) -> None:
        """Copy the sent frames that the channel still needs. Call this before the memory of the frames changes."""

    @abstractmethod
    def expire(self) -> None:
        """Forbid reconnection. The current connection continues."""


def inner_property(name: str) -> Any:
    """Return a property that reads the attribute `name` of the inner connection."""
    return property(operator.attrgetter(f"_inner.{name}"), doc=f"`{name}` of the inner connection.")


class WrappedConnection(SessionChannel):
    """Base of session channels over another connection. Its properties are those of the inner connection."""

    bytes_sent = inner_property("bytes_sent")
    bytes_received = inner_property("bytes_received")
    buffered_bytes = inner_property("buffered_bytes")
    peer = inner_property("peer")
    certificate = inner_property("certificate")
    link = inner_property("link")

    def __init__(self, inner: Connection) -> None:
        self._inner = inner

    def place_bodies(self, place: Callable[[bytes, int], memoryview | None]) -> None:
        """Receive large buffers in memory that `place` returns."""
        self._inner.place_bodies(place)

    def descriptor(self) -> int | None:
        """Return a descriptor that becomes readable when the next frame begins to arrive."""
        return self._inner.descriptor()


class PlainChannel(WrappedConnection):
    """`SessionChannel` over a single connection: the session ends with the connection. It keeps no sent frames."""

    @property
    def limits(self) -> Limits:
        """Return the maximum size of a frame, in both directions."""
        return self._inner.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._inner.limits = limits

    def send(self, frame: Frame) -> None:
        """Send a frame. The caller may reuse its buffers when this returns."""
        self._inner.send(frame)

    def receive(self, timeout: float | None = None) -> Frame:
        """Return the next frame. Wait at most `timeout` seconds, or forever if it is None."""
        return self._inner.receive(timeout)

    def close(self) -> None:
        """Close both directions. A waiting `send` or `receive` raises `TransportError`."""
        self._inner.close()

    def copy_borrowed(self) -> None:
        """Do nothing: `send` borrows no memory."""

    def expire(self) -> None:
        """Do nothing: a plain channel never reconnects."""
