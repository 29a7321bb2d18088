"""The executor's end of a session channel: journals decisions that are not deterministic, takes snapshots, replays."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from djinn_core.hookspecs.session_channel import PlainChannel, SessionChannel
from djinn_core.hookspecs.transports import Connection, Frame
from djinn_core.protocol.delivery.record_log import Buffers
from djinn_core.wire.frames import FrameQueue
from djinn_server.recovery.journal import Journal, JournalReader
from djinn_server.recovery.transfer_log import TransferRecord
from djinn_server.session_machine import CLIENT, Wait

# State of a session between two frames: the encoded snapshot, the memory of its values, and records of queued and unfinished
# transfers. The memory is valid until the next frame.
StateParts = tuple[bytes, Buffers, Sequence[TransferRecord]]


YES, NO = b"\1", b"\0"  # decisions


class ExecutorChannel(SessionChannel):
    """The executor's end of a session's channel. `receive` raises TimeoutError at once while the client may still come back."""

    @property
    def away_until(self) -> float | None:
        """Time until which a client that is not connected may come back, on the clock `time.monotonic`; None if it is not waited for."""
        return None

    @property
    def is_full(self) -> bool:
        """True while a client that is waited for has not received as many bytes as may be unacknowledged."""
        return False

    def send_each(self, frames: Iterable[Frame], send: Callable[[Frame], None]) -> Iterator[Wait]:
        """Send frames, with `send` of this channel. Wait while it `is_full`: all that is sent meanwhile is kept in memory."""
        for frame in frames:
            send(frame)
            if self.is_full:
                yield Wait((CLIENT,), here=lambda _: not self.is_full)

    def decided(self) -> bytes | None:
        """Return the result of the next decision if a former process has journaled it."""
        return None

    @abstractmethod
    def call_when_changed(self, changed: Callable[[], None]) -> None:
        """Call `changed` when the client came back or said goodbye, or when the channel was closed, in any thread."""

    @property
    @abstractmethod
    def recovery_state(self) -> tuple[Journal | None, JournalReader | None]:
        """The session's journal, and the reader of the journal that another process has left; None if there is none."""

    @abstractmethod
    def read_ahead(self, frames: int, nbytes: int) -> None:
        """Read arrived frames into the queue of `receive`, up to `frames` and `nbytes` queued. Do nothing if another thread is reading.

        Raises:
            ProtocolError: the other end does not follow the protocol.
            TransportError: the connection is broken.
        """

    @abstractmethod
    def queued(self) -> list[Frame]:
        """Return the frames in the queue of `receive`, oldest first. Thread-safe."""

    @abstractmethod
    def gone(self) -> bool:
        """Return True if the connection is broken and the client can no longer resume the session."""

    @abstractmethod
    def on_goodbye(self) -> None:
        """Discard all further replies, because the client sent `Goodbye` and reads none. Thread-safe."""

    @abstractmethod
    def send_unchecked(self, frame: Frame) -> None:
        """Send a frame whose content may differ on replay; it is not compared with the original."""

    @abstractmethod
    def send_rounded(self, frame: Frame) -> None:
        """Send values that other sessions' had a part in, so that on replay, alone, they may differ in rounding: they are not compared."""

    @abstractmethod
    def decide(self, decision: Callable[[bytes | None], bytes]) -> bytes:
        """Make a decision and journal it. `decision` gets the journaled result on replay, or else None.

        Raises:
            SessionLost: the result differs on replay.
        """

    @abstractmethod
    def snapshot_if_due(self, state: Callable[[], StateParts | None], still: AbstractContextManager[object]) -> None:
        """Called between two frames. If it is due, compact the journal to a snapshot of `state()`; `still` is a lock held meanwhile."""

    @abstractmethod
    def put_aside(
        self, state: Callable[[], StateParts | None], still: AbstractContextManager[object]
    ) -> JournalReader | None:
        """Compact the journal to a snapshot of `state()` now, and return its reader; None if that is not possible. `still`: as for `snapshot_if_due`.

        Raises:
            SessionLost: what was written cannot be read.
        """

    @abstractmethod
    def resend(self) -> None:
        """Resend what the process before had sent and the client has not received."""


class PlainExecutorChannel(PlainChannel, ExecutorChannel):
    """Implements `ExecutorChannel` over a single connection: the session ends with it, and nothing is journaled."""

    recovery_state: tuple[Journal | None, JournalReader | None] = (None, None)

    def __init__(self, inner: Connection) -> None:
        super().__init__(inner)
        self._early = FrameQueue()
        self._reading = threading.Lock()
        self._client_left = False
        self._changed: Callable[[], None] = lambda: None

    def call_when_changed(self, changed: Callable[[], None]) -> None:
        """As `ExecutorChannel.call_when_changed`."""
        self._changed = changed

    def close(self) -> None:
        """As `Connection.close`."""
        super().close()
        self._changed()

    def send(self, frame: Frame) -> None:
        """As `Connection.send`; nothing after `on_goodbye`."""
        if not self._client_left:
            super().send(frame)

    def receive(self, timeout: float | None = None) -> Frame:
        """As `Connection.receive`."""
        with self._reading:
            return self._early.popleft() if self._early else super().receive(timeout)

    def read_ahead(self, frames: int, nbytes: int) -> None:
        """As `ExecutorChannel.read_ahead`."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._early.fill(partial(super().receive, 0.0), frames, nbytes)
        finally:
            self._reading.release()

    def queued(self) -> list[Frame]:
        """As `ExecutorChannel.queued`."""
        return list(self._early)

    def gone(self) -> bool:
        """As `ExecutorChannel.gone`: a client without a lease cannot resume."""
        return True

    def on_goodbye(self) -> None:
        """As `ExecutorChannel.on_goodbye`."""
        self._client_left = True
        self._changed()

    def send_unchecked(self, frame: Frame) -> None:
        """As `ExecutorChannel.send_unchecked`: nothing is checked."""
        self.send(frame)

    def send_rounded(self, frame: Frame) -> None:
        """As `ExecutorChannel.send_rounded`: nothing is compared."""
        self.send(frame)

    def decide(self, decision: Callable[[bytes | None], bytes]) -> bytes:
        """As `ExecutorChannel.decide`: nothing was decided before."""
        return decision(None)

    def snapshot_if_due(self, state: Callable[[], StateParts | None], still: AbstractContextManager[object]) -> None:
        """As `ExecutorChannel.snapshot_if_due`: there is no journal."""

    def put_aside(
        self,
        state: Callable[[], StateParts | None],  # noqa: ARG002 - there is no journal
        still: AbstractContextManager[object],  # noqa: ARG002
    ) -> JournalReader | None:
        """As `ExecutorChannel.put_aside`: there is no journal."""
        return None

    def resend(self) -> None:
        """As `ExecutorChannel.resend`: there is no process before this one."""
