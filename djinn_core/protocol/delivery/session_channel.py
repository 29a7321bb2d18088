"""Session channel: the connection of a session, whether it outlives a broken transport connection or not."""

from __future__ import annotations

from typing import Protocol

from djinn_core.hookspecs.transports import Connection, Frame, Limits, LinkFacts, link_of


class SessionChannel(Connection, Protocol):
    """A connection that may use the memory of sent frames until `own` is called, and that may continue over another connection after a break."""

    def own(self) -> None:
        """Copy sent frames whose memory is still used, because it is about to change."""

    def expire(self) -> None:
        """Allow no further connection; the present one continues."""


class PlainChannel:
    """Implements `SessionChannel` over a single connection, with which the session ends. It uses no memory of sent frames."""

    def __init__(self, inner: Connection) -> None:
        self._inner = inner

    @property
    def limits(self) -> Limits:
        """As `Connection.limits`."""
        return self._inner.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._inner.limits = limits

    @property
    def bytes_sent(self) -> int:
        """As `Connection.bytes_sent`."""
        return self._inner.bytes_sent

    @property
    def bytes_received(self) -> int:
        """As `Connection.bytes_received`."""
        return self._inner.bytes_received

    @property
    def link(self) -> LinkFacts:
        """As `LinkMeasured.link`."""
        return link_of(self._inner)

    def send(self, frame: Frame) -> None:
        """As `Connection.send`."""
        self._inner.send(frame)

    def receive(self, timeout: float | None = None) -> Frame:
        """As `Connection.receive`."""
        return self._inner.receive(timeout)

    def close(self) -> None:
        """As `Connection.close`."""
        self._inner.close()

    def own(self) -> None:
        """As `SessionChannel.own`: there is nothing to copy."""

    def expire(self) -> None:
        """As `SessionChannel.expire`: there is no further connection."""
