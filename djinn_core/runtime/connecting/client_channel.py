"""The client's channel to an executor: what a session needs to know of reconnection and failover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from djinn_core.delivery.session_channel import PlainChannel, SessionChannel
from djinn_core.hookspecs.transports import Connection
from djinn_core.wire.messages import Attached


class Reconnection(Protocol):
    """Finds an executor again that has a session; `instance` is the process that it was found in last."""

    instance: str

    def __call__(self, received: int, seconds: float) -> tuple[Connection, int]:
        """Reconnect: a connection that continues the session, and the number of frames that the executor has received.

        `received`: number of frames that this end has received.

        Raises:
            AccessRefused: the session is over.
            DjinnError: there is none within `seconds`.
        """

    def control_channel(self) -> Connection:
        """A control channel of the session.

        Raises:
            DjinnError: there is none, for the time being.
        """


class ClientChannel(SessionChannel, Protocol):
    """The client's end of a session's channel."""

    @property
    def crashes_executors(self) -> bool:
        """True if the session itself kills its executors: any other one would come to the same end."""

    @property
    def logged(self) -> bool:
        """True if what is sent and answered is logged, to be done again elsewhere: values to and from other executors go this way, too."""

    @property
    def successor(self) -> Attached | None:
        """Reply of the executor that took the session over from the first one; None if that one has it."""

    @property
    def reconnection(self) -> Reconnection | None:
        """Reconnection to the executor after a break; None if there is none."""

    def hasten(self, patience: float) -> None:
        """Stop reconnecting after `patience` seconds, if that is sooner."""

    def call_when_resumed(self, resumed: Callable[[float], None]) -> None:
        """Call `resumed`, too, each time that the session goes on over another connection: with the seconds that there was none."""


class PlainClientChannel(PlainChannel):
    """Implements `ClientChannel` over a single connection: the session is lost with it."""

    crashes_executors = False
    logged = False
    successor: Attached | None = None
    reconnection: Reconnection | None = None

    def hasten(self, patience: float) -> None:
        """As `ClientChannel.hasten`: it does not reconnect anyway."""

    def call_when_resumed(self, resumed: Callable[[float], None]) -> None:
        """As `ClientChannel.call_when_resumed`: it does not come to that."""
