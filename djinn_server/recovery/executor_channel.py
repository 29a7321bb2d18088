"""The executor's end of a session channel, with the session's journal."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from djinn_core.hookspecs.session_channel import PlainChannel, SessionChannel
from djinn_core.hookspecs.transports import Connection, Frame
from djinn_core.wire.frames import FrameQueue
from djinn_server.recovery.journal import Journal, Position
from djinn_server.session_machine import CLIENT, Wait

YES, NO = b"\1", b"\0"  # results of logged decisions


class ExecutorChannel(SessionChannel):
    """The executor's end of a session channel.

    While a disconnected client may still reconnect, `receive` raises TimeoutError at once.

    Attributes:
        journal: the session's journal, which logs each frame before `receive` returns it; closed if it logs nothing.
    """

    journal: Journal

    @property
    def away_until(self) -> float | None:
        """Time (`time.monotonic`) until which a disconnected client may reconnect; None for other clients."""
        return None

    @property
    def is_full(self) -> bool:
        """True if the client is disconnected and unacknowledged bytes fill the send window."""
        return False

    def send_each(self, frames: Iterable[Frame]) -> Iterator[Wait]:
        """Send frames. Yield a wait while the channel `is_full`, because unacknowledged frames stay in memory."""
        for frame in frames:
            self.send(frame)
            if self.is_full:
                yield Wait((CLIENT,), has_arrived=lambda _: not self.is_full)

    @abstractmethod
    def call_when_changed(self, changed: Callable[[], None]) -> None:
        """Set a callback for a reconnect, a `Goodbye` and the end of the channel. Any thread may call it."""

    @abstractmethod
    def read_ahead(self, frames: int, nbytes: int) -> None:
        """Read arrived frames into the queue of `receive`, up to `frames` frames and `nbytes` bytes in the queue.

        Do nothing if another thread is reading.

        Raises:
            ProtocolError: the other end does not follow the protocol.
            TransportError: the connection is broken.
        """

    @abstractmethod
    def queued(self) -> list[Frame]:
        """Return the frames in the queue of `receive`, the oldest first. Thread-safe."""

    @abstractmethod
    def gone(self) -> bool:
        """Return True if the connection is broken and the client can no longer resume the session."""

    @abstractmethod
    def on_goodbye(self) -> None:
        """Discard all further replies, because a client that sent `Goodbye` does not read them. Thread-safe."""

    @contextmanager
    def at_rest(self) -> Iterator[Position | None]:
        """Inside the block, receive nothing. Yield the position between two frames, or None if frames are queued."""
        yield None

    @abstractmethod
    def abandon_replay(self) -> None:
        """End a failed replay, so that the next `send` reaches the client."""

    @abstractmethod
    def resend(self) -> None:
        """Resend an earlier process's frames that the client has not received."""


class PlainExecutorChannel(PlainChannel, ExecutorChannel):
    """A session channel without a lease: the session ends with the connection, and nothing is logged."""

    def __init__(self, inner: Connection) -> None:
        super().__init__(inner)
        self.journal = Journal()
        self._early = FrameQueue()
        self._read_lock = threading.Lock()
        self._client_left = False
        self._changed: Callable[[], None] = lambda: None

    def call_when_changed(self, changed: Callable[[], None]) -> None:
        """Call `changed` when the channel changes, as `ExecutorChannel.call_when_changed` does."""
        self._changed = changed

    def close(self) -> None:
        """Close the connection, as `Connection.close` does."""
        super().close()
        self._changed()

    def send(self, frame: Frame) -> None:
        """Send a frame, as `Connection.send` does. After `on_goodbye`, do nothing."""
        if not self._client_left:
            super().send(frame)

    def receive(self, timeout: float | None = None) -> Frame:
        """Receive a frame, as `Connection.receive` does."""
        with self._read_lock:
            return self._early.popleft() if self._early else super().receive(timeout)

    def read_ahead(self, frames: int, nbytes: int) -> None:
        """Read arrived frames into the queue, as `ExecutorChannel.read_ahead` does."""
        if not self._read_lock.acquire(blocking=False):
            return
        try:
            self._early.fill(partial(super().receive, 0.0), frames, nbytes)
        finally:
            self._read_lock.release()

    def queued(self) -> list[Frame]:
        """Return the queued frames, oldest first."""
        return list(self._early)

    def gone(self) -> bool:
        """Return True if the connection is broken: a client without a lease cannot resume."""
        return True

    def on_goodbye(self) -> None:
        """Discard all further replies."""
        self._client_left = True
        self._changed()

    def abandon_replay(self) -> None:
        """Do nothing: this channel never replays."""

    def resend(self) -> None:
        """Do nothing: there was no earlier process."""
