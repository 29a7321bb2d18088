"""The executor's channel to a client: the order of decisions, snapshots and replay, for sessions that can be recovered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from djinn_core.delivery.session_channel import PlainChannel, SessionChannel
from djinn_core.hookspecs.transports import Frame
from djinn_core.server.recovery.journal import Journal, JournalReader
from djinn_core.server.recovery.transfer_log import Record
from djinn_core.wire.frames import Buffer

# A session between two frames: encoded, its memory, and records of shipments that wait or are under way.
State = tuple[bytes, Sequence[Buffer], Sequence[Record]]


class ExecutorChannel(SessionChannel, Protocol):
    """The executor's end of a session's channel."""

    @property
    def recovery_state(self) -> tuple[Journal | None, JournalReader | None]:
        """The session's journal, and the reader of the journal that another process has left; None where there is none."""

    @property
    def reads_ahead(self) -> bool:
        """True if what comes can be read while the session computes."""

    def read_ahead(self, frames: int, nbytes: int) -> list[Frame]:
        """Take in what came, for `receive`; at most so much may wait there. Returns what is new of it.

        Raises:
            ProtocolError: the other end does not follow the protocol.
            TransportError: the connection is broken.
        """

    def gone(self) -> bool:
        """True if the connection is broken and the client has stayed away for too long."""

    def send_unchecked(self, frame: Frame) -> None:
        """Send a frame that may be another one where the session is replayed."""

    def decide(self, decision: Callable[[bytes | None], bytes]) -> bytes:
        """Make a decision and journal it. `decision` is passed what it returned in the process before, or None.

        Raises:
            SessionLost: it decides differently now.
        """

    def keep(self, state: Callable[[], State | None], still: AbstractContextManager[object]) -> None:
        """The session is between two frames: the journal may begin anew with its `state`; `still` keeps other threads off it."""

    def resend(self) -> None:
        """Send what another process had sent and the client has not taken."""


class PlainExecutorChannel(PlainChannel):
    """Implements `ExecutorChannel` over a single connection: the session ends with it, and nothing of it is written down."""

    recovery_state: tuple[Journal | None, JournalReader | None] = (None, None)
    reads_ahead = False

    def read_ahead(self, frames: int, nbytes: int) -> list[Frame]:  # noqa: ARG002 - reads nothing
        """As `ExecutorChannel.read_ahead`: nothing is read before the session asks for it."""
        return []

    def gone(self) -> bool:
        """As `ExecutorChannel.gone`: `receive` says so."""
        return False

    def send_unchecked(self, frame: Frame) -> None:
        """As `ExecutorChannel.send_unchecked`: nothing is checked."""
        self.send(frame)

    def decide(self, decision: Callable[[bytes | None], bytes]) -> bytes:
        """As `ExecutorChannel.decide`: nothing was decided before."""
        return decision(None)

    def keep(self, state: Callable[[], State | None], still: AbstractContextManager[object]) -> None:
        """As `ExecutorChannel.keep`: there is no journal."""

    def resend(self) -> None:
        """As `ExecutorChannel.resend`: there is no process before this one."""
