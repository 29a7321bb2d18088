"""Connection of a session with a lease: if it breaks, the session waits for its client until the lease expires."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection, Frame
from djinn_core.logs import get_logger
from djinn_core.protocol.delivery.reliable_connection import NotReconnected, ReliableConnection
from djinn_core.wire import limits
from djinn_core.wire.messages import Goodbye, is_of_kind
from djinn_core.wire.resume_messages import Resumed
from djinn_server.handshake import instance, send_message
from djinn_server.recovery.executor_channel import ExecutorChannel
from djinn_server.recovery.journal import Journal, Position
from djinn_server.usage_metrics import UsageMetrics

_log = get_logger("djinn.server")


class LeasedConnection(ReliableConnection, ExecutorChannel):
    """A session channel whose client may reconnect with the session's secret."""

    def __init__(
        self,
        inner: Connection,
        seconds: float,
        usage: UsageMetrics,
        secret: str = "",
        journal: Journal | None = None,
    ) -> None:
        """Wrap a connection.

        Args:
            inner: connection to the client.
            seconds: duration of the lease after a disconnect.
            usage: counter of reconnects.
            secret: secret that the client must show to reconnect.
            journal: log of received frames.
        """
        super().__init__(inner)
        self.journal = journal or Journal()
        self._accept = self.journal.frame if self.journal.open else None
        self._usage = usage
        self.secret = secret or secrets.token_urlsafe(32)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._changed: Callable[[], None] = lambda: None
        self._client_left = False
        self._broken: Connection | None = None  # the last connection that broke
        self._broken_at = 0.0

    def replay(self, received: int) -> None:
        """Replay the journal of an earlier process. `received`: number of replies that the client has received."""
        self._replay = past = self.journal.past
        assert past is not None
        self._inbox.take(past.taken)
        if past.base is not None:
            self._outbox.restore(past.base.sent, past.replies())
        self._outbox.repeat(received)

    @contextmanager
    def at_rest(self) -> Iterator[Position | None]:
        """Receive nothing inside the block, as `ExecutorChannel.at_rest` does."""
        with self._read_lock:
            if self._early:
                yield None
                return
            with self._send_lock, self._outbox_lock:
                replies = [frame for _, frame in self._outbox.kept()]
                position = Position(self._inbox.received, self._outbox.sent, replies)
            yield position

    def send(self, frame: Frame) -> None:
        """Send a frame, as `ReliableConnection.send` does. After `on_goodbye`, send nothing."""
        if not self._client_left:
            super().send(frame)

    def abandon_replay(self) -> None:
        """End a failed replay, as `ExecutorChannel.abandon_replay` does."""
        with self._send_lock, self._outbox_lock:
            self._outbox.abandon_replay()

    def resend(self) -> None:
        """Resend unreceived frames, as `ExecutorChannel.resend` does."""
        self._retransmit(self._inner)

    def read_ahead(self, frames: int, nbytes: int) -> None:
        """Read arrived frames into the queue. During a replay, do nothing."""
        if not self.journal.replaying:
            inner = self._inner
            try:
                super().read_ahead(frames, nbytes)
            except TransportError as error:
                self._note_break(inner, error)
                raise

    def _check_ahead(self) -> None:
        if self._early.full(limits.BACKLOG_FRAMES, limits.BACKLOG_BYTES):
            raise ProtocolError(
                f"the client sent {len(self._early):,} messages of {self._early.nbytes:,} bytes without reading a reply; the limits are "
                f"{limits.BACKLOG_FRAMES:,} messages and {limits.BACKLOG_BYTES:,} bytes"
            )

    def gone(self) -> bool:
        """Return True if the lease has expired. The lease begins when the executor notices the disconnect."""
        seconds = self.lease_seconds_left()
        return seconds is not None and seconds < 0.0

    def _note_break(self, broken: Connection, error: TransportError) -> None:
        """Begin the lease, unless `broken` is an old connection or the lease has already begun."""
        with self._lock:
            if self._inner is not broken or self._broken is broken:
                return
            self._broken, self._broken_at = broken, time.monotonic()
        if not self._expired:
            _log.info("a client's connection broke: its session waits", seconds=self._seconds, reason=str(error))

    def lease_seconds_left(self) -> float | None:
        """Return the seconds until the lease ends, or None while the client is connected. Thread-safe."""
        with self._lock:
            return self._broken_at + self._seconds - time.monotonic() if self._broken is self._inner else None

    def call_when_changed(self, changed: Callable[[], None]) -> None:
        """Call `changed` when the channel changes, as `ExecutorChannel.call_when_changed` does."""
        self._changed = changed

    def on_goodbye(self) -> None:
        """Discard all further replies. If the session waits for its client, it continues with received frames."""
        self._client_left = True
        self._changed()

    @property
    def away_until(self) -> float | None:
        """Time until which a disconnected client may reconnect, as `ExecutorChannel.away_until`."""
        if self._broken is not self._inner or self._client_left or self._expired or self._closed:
            return None
        until = self._broken_at + self._seconds
        return until if time.monotonic() < until else None

    @property
    def is_full(self) -> bool:
        """True if the send window of a disconnected client is full, as `ExecutorChannel.is_full`."""
        return self.away_until is not None and self._outbox.nbytes > self._window

    def _restore(self, broken: Connection, error: TransportError) -> None:
        self._copy_borrowed()  # ops may overwrite borrowed memory during the wait
        self._read_goodbye()
        self._note_break(broken, error)
        with self._lock:
            if self._inner is not broken:
                return
            until = self._broken_at + self._seconds
        if self._client_left:
            with self._outbox_lock:
                self._outbox.acknowledge(self._outbox.sent)
        elif self._expired:
            raise error
        elif time.monotonic() < until:
            raise NotReconnected("the client is not connected")
        else:
            self._closed = f"the client did not reconnect within {self._seconds:g} s: {error}"
            raise TransportError(self._closed)

    def _raise_disconnected(self, error: TimeoutError) -> None:
        if isinstance(error, NotReconnected):
            raise error

    def _read_goodbye(self) -> None:
        """Handle a `Goodbye` that arrived before the connection broke."""
        with contextlib.suppress(TransportError, ProtocolError):
            self.read_ahead(limits.BACKLOG_FRAMES, limits.BACKLOG_BYTES)
        if any(is_of_kind(frame.head, Goodbye) for frame in self.queued()):
            self.on_goodbye()

    def resume(self, inner: Connection, received_count: int, on_resume: Callable[[], None] = lambda: None) -> None:
        """Continue over another connection.

        `inner`: the new connection. `received_count`: number of frames that the client has received. `on_resume`: called on success.

        Raises:
            ProtocolError: fewer frames were sent than the client claims to have received.
            TransportError: the connection broke at once, or the session has ended meanwhile.
        """

        def greet(received: int) -> None:
            if self._closed:  # `close` may have run before it could close `inner`
                raise TransportError(self._closed)
            send_message(inner, Resumed(received, instance()))

        try:
            self._adopt(inner, received_count, greet)
            self._usage.count("sessions_resumed")
            on_resume()
        except TransportError:
            inner.close()
            raise
        finally:
            self._changed()  # a session may wait for the former connection, which is closed

    def expire(self) -> None:
        """End the lease, as `ReliableConnection.expire` does. A session that waits for its client ends."""
        super().expire()
        self._changed()

    def close(self) -> None:
        """Close the connection and the journal."""
        super().close()
        self.journal.close()
        self._changed()
