"""Reliable connection: unacknowledged frames are sent again over the next connection after a break."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from threading import get_ident
from typing import Final, Protocol

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.session_channel import WrappedConnection
from djinn_core.hookspecs.transports import Connection, Frame, Limits
from djinn_core.logs import get_logger
from djinn_core.system.interrupts import interrupt_mask
from djinn_core.wire import limits
from djinn_core.wire.frame_order import (
    COUNT_MASK,
    PREFIX_BYTES,
    AckFlags,
    FrameOrder,
    Inbox,
    Outbox,
    Prefix,
    body_bytes,
    pack_prefix,
    split,
    unpack_prefix,
)
from djinn_core.wire.frames import FrameQueue

_NOTE_FRAMES: Final = 32  # limit of received frames before a note acknowledges them, if none is sent
_NOTE_BYTES: Final = 1 << 20
# a body of this size is acknowledged at once, because the peer keeps it in memory until then
_ACK_BYTES: Final = 64 << 10
_LARGE_BYTES: Final = 128 << 10  # this many bytes fit into socket buffers
_MAX_WINDOW: Final = 32 << 20
_MIN_WINDOW: Final = 4 << 20
# limit of consecutive connections that break on malformed bytes; then the other end is not a peer
_GARBLED_CONNECTIONS: Final = 3
_TURN_SECONDS: Final = 0.05
_FIRST_PROBE_SECONDS: Final = 0.05
_MAX_PROBE_SECONDS: Final = 2.0
_log = get_logger("djinn.delivery")


class FramesLost(ProtocolError):  # noqa: N818 - says what happened
    """The other end has lost acknowledged frames, so the session cannot continue."""


class NotReconnected(TimeoutError):  # noqa: N818 - a signal within this file and those above it
    """The connection is broken, and the caller does not wait for the next connection.

    The next operation tries again.
    """


def no_greeting(_: int) -> None:
    """Send no greeting to the peer of a new connection."""


class ReconnectingConnection(WrappedConnection):
    """Base of session channels over a sequence of transport connections. It borrows sent buffers."""

    def __init__(self, inner: Connection) -> None:
        super().__init__(inner)
        self._limits = inner.limits
        self._past_sent = self._past_received = 0  # bytes of earlier connections

    @property
    def limits(self) -> Limits:
        """Return the maximum size of a frame, in both directions."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = self._inner.limits = limits

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent over all connections so far, framing included."""
        return self._past_sent + self._inner.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Return the bytes received over all connections so far, framing included."""
        return self._past_received + self._inner.bytes_received

    def _follow(self, inner: Connection) -> None:
        previous, self._inner = self._inner, inner
        inner.limits = self._limits
        self._past_sent += previous.bytes_sent
        self._past_received += previous.bytes_received


class Replay(Protocol):
    """Frames of an earlier process, which are read before the frames of the connection."""

    @property
    def over(self) -> bool:
        """True if all frames were read."""

    def next_frame(self) -> Frame:
        """Return the next frame."""


class ReliableConnection(ReconnectingConnection):
    """A session channel over a sequence of connections. Frames arrive exactly once, in order.

    `send` may be called from several threads, `receive` from one thread at a time.
    """

    _probes = False  # True if this end probes for an acknowledgement while it waits

    def __init__(self, inner: Connection) -> None:
        super().__init__(inner)
        self._outbox = Outbox()
        self._inbox = Inbox()
        # Locks, acquired in this order. No thread waits while it holds the last one.
        self._read_lock = threading.RLock()  # held by the reading thread
        self._send_lock = threading.RLock()  # held while frames are numbered and sent
        self._inbox_lock = threading.Lock()  # held while received frames are counted
        self._outbox_lock = threading.Lock()  # around the outbox
        self._early = FrameQueue()  # frames read ahead by a sender that looked for notes
        self._frames = self._bytes = 0  # frames received since the last acknowledgement
        self._missing_requested = False
        self._malformed_count = 0  # consecutive connections that broke on malformed bytes
        self._awaiting_retransmit: Connection | None = None  # the connection over which retransmission has not started
        self._closed = ""  # reason why nothing can be sent any more
        self._replay: Replay | None = None
        self._accept: Callable[[Frame], Frame] | None = None  # logs a frame before it is acknowledged
        self._expired = False
        self._probe = _FIRST_PROBE_SECONDS
        self._probe_at: float | None = None  # time of the next probe, during a wait
        self._window = _MAX_WINDOW  # limit of unacknowledged bytes
        self._place: Callable[[bytes, int], memoryview | None] | None = None

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        """Send a frame. Its buffers are borrowed until they are acknowledged or `copy_borrowed` is called.

        Raises:
            TransportError: there will be no further connection.
        """
        if self._closed:
            raise TransportError(self._closed)
        if not interrupt_mask.depth and get_ident() == interrupt_mask.main:
            with interrupt_mask:  # a numbered frame is always sent, now or after an interrupt
                self.send(frame)
            return
        outbox = self._outbox
        try:
            with self._send_lock:
                inner = self._inner
                with self._outbox_lock:
                    number = outbox.put(frame)
                if outbox.ahead is not None:
                    return
                if (
                    self._awaiting_retransmit is not inner
                ):  # otherwise the retransmission sends it, after earlier frames
                    self._frames = self._bytes = 0
                    inner.send(Frame(pack_prefix(number, self._inbox.received, 0) + frame.head, frame.body))
        # outside of the lock, because no thread waits for a connection while it holds the lock
        except TransportError as error:
            with contextlib.suppress(NotReconnected):
                self._restore(inner, error)
            return
        if outbox.borrows and frame.body:
            with contextlib.suppress(NotReconnected):
                self._read_acknowledgements()
                self._await_window()

    def copy_borrowed(self) -> None:
        """Copy the bodies of unacknowledged frames. Call this before their memory changes."""
        if self._outbox.borrows:
            self._read_acknowledgements()
            self._copy_borrowed()

    def _copy_borrowed(self) -> None:
        with self._send_lock, self._outbox_lock:  # ensures that no other thread is retransmitting
            self._outbox.copy_borrowed()

    def _put_on_wire(self, inner: Connection, number: int, frame: Frame) -> None:
        self._frames = self._bytes = 0
        inner.send(Frame(pack_prefix(number, self._inbox.received, 0) + frame.head, frame.body))

    def _send_note(self, wish: AckFlags = AckFlags.NOTHING, asked: int = 0) -> None:
        """Send a note (`Prefix`). If another thread is sending a frame, do nothing: the frame acknowledges, too."""
        if self._send_lock.acquire(blocking=False):
            try:
                self._frames = self._bytes = 0
                self._inner.send(Frame(Prefix(self._outbox.sent, self._inbox.received, wish, asked).encode()))
            except TransportError as error:
                _log.debug("an acknowledgement was not sent", reason=str(error))  # the next reader notices the break
            finally:
                self._send_lock.release()

    def _retransmit(self, inner: Connection) -> None:
        with self._send_lock:
            self._awaiting_retransmit = None
            with self._outbox_lock:
                unacknowledged = self._outbox.kept()
            with contextlib.suppress(TransportError):  # the next reader or sender notices the break
                for number, frame in unacknowledged:
                    if inner is not self._inner:
                        return
                    self._put_on_wire(inner, number, frame)

    # --- receiving --------------------------------------------------------------------------------------------

    def receive(self, timeout: float | None = None) -> Frame:
        """Return the next frame. Wait at most `timeout` seconds, or forever if it is None.

        Raises:
            TimeoutError: no frame arrived in time.
            ProtocolError: the other end does not follow the protocol, on several connections in a row.
            TransportError: there will be no further connection.
        """
        if self._replay is not None:
            if not self._replay.over:
                return self._replay.next_frame()
            self._replay = None
        if not self._read_lock.acquire(blocking=False):
            started = time.monotonic()
            if not self._read_lock.acquire(timeout=-1 if timeout is None else timeout):
                raise TimeoutError(f"another thread has been receiving for more than {timeout} s")
            timeout = None if timeout is None else max(0.0, started + timeout - time.monotonic())
        try:
            if self._early:
                return self._early.popleft()
            if self._probe_at is None and (timeout is None or timeout > _FIRST_PROBE_SECONDS):
                # Usually a frame arrives before the clock must be read.
                without_deadline = timeout is None and not self._probes
                try:
                    frame = self._receive_next(None if without_deadline else _FIRST_PROBE_SECONDS)
                    if frame is not None:
                        self._probe = _FIRST_PROBE_SECONDS
                        return frame
                except TimeoutError as error:
                    self._raise_disconnected(error)
                    timeout = None if timeout is None else timeout - _FIRST_PROBE_SECONDS
                    self._probe_at = time.monotonic() if self._probes else None
                    self._probe_if_due()
            deadline = None if timeout is None else time.monotonic() + timeout
            while True:
                if self._early:
                    return self._early.popleft()
                try:
                    without_deadline = deadline is None and not self._probes
                    frame = self._receive_next(None if without_deadline else self._poll_seconds(deadline))
                except TimeoutError as error:
                    self._raise_disconnected(error)
                    self._probe_if_due()
                    if deadline is not None and time.monotonic() >= deadline:
                        raise
                    continue
                if frame is not None:
                    self._probe, self._probe_at = _FIRST_PROBE_SECONDS, None
                    return frame
        finally:
            self._read_lock.release()

    def _raise_disconnected(self, error: TimeoutError) -> None:
        """Raise `error` if this end should not wait for a new connection. By default, it waits."""

    def _poll_seconds(self, deadline: float | None) -> float | None:
        """Return the seconds until `deadline` or the next probe, whichever comes first."""
        now = time.monotonic()
        until = deadline
        if self._probes:
            probe_at = self._probe_at
            if probe_at is None:
                self._probe_at = probe_at = now + self._probe
            if until is None or until > probe_at:
                until = probe_at
        if until is None:
            return None
        return until - now if until > now else 0.0

    def _probe_if_due(self) -> None:
        now = time.monotonic()
        if self._probe_at is not None and now >= self._probe_at:
            self._send_note(AckFlags.ACK_REQUEST)
            self._probe = min(2 * self._probe, _MAX_PROBE_SECONDS)
            self._probe_at = now + self._probe

    def place_bodies(self, place: Callable[[bytes, int], memoryview | None]) -> None:
        """Receive large buffers in memory that `place` returns, over each connection."""
        self._place = lambda head, nbytes: place(head[PREFIX_BYTES:], nbytes)
        self._inner.place_bodies(self._place)

    def _follow(self, inner: Connection) -> None:
        super()._follow(inner)
        if self._place is not None:
            inner.place_bodies(self._place)

    def read_ahead(self, frames: int, nbytes: int) -> None:
        """Read arrived frames into the queue of `receive`, up to `frames` frames and `nbytes` bytes.

        Do nothing if another thread reads.

        Raises:
            ProtocolError: the other end does not follow the protocol.
            TransportError: the connection is broken. The next `send` or `receive` handles that.
        """
        if not self._read_lock.acquire(blocking=False):
            return
        try:
            self._early.fill(lambda: self._receive_frame(self._inner, 0.0), frames, nbytes)
        finally:
            self._read_lock.release()

    def queued(self) -> list[Frame]:
        """Return the frames in the queue of `receive`, oldest first. Thread-safe."""
        return list(self._early)

    def _receive_next(self, timeout: float | None) -> Frame | None:
        """Return the next frame, or None after a note, a frame out of order, or a change of the connection."""
        inner = self._inner
        if self._closed:
            raise TransportError(self._closed)
        try:
            return self._receive_frame(inner, timeout)
        except TransportError as error:
            self._restore(inner, error)
            return None

    def _receive_frame(self, inner: Connection, timeout: float | None) -> Frame | None:
        """Return the next frame of `inner`; None after a note or a frame out of order, or if `inner` was replaced."""
        try:
            frame = inner.receive(timeout)
            head = frame.head[PREFIX_BYTES:]
            number, received, wish = unpack_prefix(frame.head) if head else (0, 0, 1)
            note = None
            if wish:
                note, head = split(frame)
                number, received = note.number, note.received
        except ProtocolError as error:  # malformed bytes break the connection, but not the session
            inner.close()
            self._malformed_count += 1
            if self._malformed_count > _GARBLED_CONNECTIONS:
                raise
            raise TransportError(str(error)) from error
        with self._inbox_lock:
            if inner is not self._inner:
                return None  # not counted, so that the peer retransmits it over the new connection
            with self._outbox_lock:
                self._outbox.acknowledge(received)
            inbox, order = self._inbox, None
            if head:
                if number == (inbox.received + 1) & COUNT_MASK:  # as mostly
                    order = FrameOrder.NEXT
                    next_frame = Frame(head, frame.body)
                    if self._accept is not None:
                        next_frame = self._accept(next_frame)
                    inbox.received = number
                else:
                    order = inbox.judge(number)
        if order is None:
            assert note is not None
            self._handle_note(note, inner)
        elif order is FrameOrder.AHEAD:
            self._request_missing()
        elif order is FrameOrder.NEXT:
            self._missing_requested = False
            self._malformed_count = 0
            self._frames += 1
            if frame.body or self._frames >= _NOTE_FRAMES:
                self._bytes += (nbytes := body_bytes(frame))
                if nbytes >= _ACK_BYTES or self._frames >= _NOTE_FRAMES or self._bytes >= _NOTE_BYTES:
                    self._send_note()
            return next_frame
        return None

    def _handle_note(self, note: Prefix, inner: Connection) -> None:
        """Handle a note: fulfil its requests, and detect lost frames."""
        reply_flags = AckFlags.ACK_REPLY if note.wish & AckFlags.ACK_REQUEST else AckFlags.NOTHING
        if self._inbox.misses(note.number):
            reply_flags |= AckFlags.RETRANSMIT  # even if requested before, because that request may be lost
        if reply_flags:
            self._send_note(reply_flags, note.number)
        was_lost = note.wish & AckFlags.ACK_REPLY and self._outbox.sent_after(note.received, note.asked)
        if was_lost or note.wish & AckFlags.RETRANSMIT:
            self._retransmit(inner)

    def _request_missing(self) -> None:
        """Request missing frames, once. If the request is lost, the next probe detects that."""
        if not self._missing_requested:
            self._missing_requested = True
            self._send_note(AckFlags.RETRANSMIT)

    def _read_acknowledgements(self) -> None:
        """Read acknowledgements that have arrived, unless another thread reads."""
        if self._read_lock.acquire(blocking=False):
            try:
                while not self._early.full(limits.AHEAD_FRAMES, limits.AHEAD_BYTES):
                    frame = self._receive_next(0.0)
                    if frame is not None:
                        self._early.append(frame)
                    elif not self._outbox.borrows:
                        return
            except TimeoutError:
                return
            finally:
                self._read_lock.release()

    def _await_window(self) -> None:
        """Wait until unacknowledged bytes fit into the window, or an interrupt is pending."""
        while self._outbox.nbytes > self._window and not self._closed and not interrupt_mask.pending:
            if not self._read_lock.acquire(timeout=_TURN_SECONDS):
                continue  # the reading thread receives acknowledgements
            try:
                frame = self._receive_next(_TURN_SECONDS)
                if frame is not None:
                    self._early.append(frame)
                    self._check_ahead()
            except NotReconnected:
                raise
            except TimeoutError:
                self._send_note(AckFlags.ACK_REQUEST)
            finally:
                self._read_lock.release()

    def _check_ahead(self) -> None:
        """Check the number of frames read ahead. By default there is no limit, because this end requested all of them.

        Raises:
            ProtocolError: too many frames were read ahead.
        """

    # --- changing connections -------------------------------------------------------------------------------------

    @abstractmethod
    def _restore(self, broken: Connection, error: TransportError) -> None:
        """Wait until a new connection replaces `broken`.

        Raises:
            TransportError: no further connection is possible.
            NotReconnected: there is no new connection yet, and the caller does not wait.
        """

    def _retire(self) -> int:
        """Close the current connection. Return the number of frames received over all connections so far."""
        with self._inbox_lock:
            self._inner.close()
            return self._inbox.received

    def _adopt(self, inner: Connection, received: int, greet: Callable[[int], None] = no_greeting) -> None:
        """Continue over `inner`, whose peer has received `received` frames.

        Before the first send, `greet` is called with the number of frames that this end has received.

        Raises:
            FramesLost: the peer has lost frames that it received. This end does not use `inner`.
            ProtocolError: the peer claims more frames than this end sent. This end does not use `inner`.
            TransportError: `greet` could not send.
        """
        self._inner.close()  # ends a `send` of another thread
        with self._send_lock:
            with self._outbox_lock:
                if lost_count := self._outbox.lost(received):
                    raise FramesLost(
                        f"{lost_count:,} messages that had been received are lost: the end of the session's journal is "
                        "missing, for example after a disk failure"
                    )
                self._outbox.acknowledge(received)
                is_large = self._outbox.nbytes > _LARGE_BYTES
            with self._inbox_lock:
                self._follow(inner)
                self._missing_requested = False
                # a broken connection loses unacknowledged frames
                self._window = max(_MIN_WINDOW, self._window // 4)
                own_received = self._inbox.received
            greet(own_received)
            self._awaiting_retransmit = inner
            if not is_large:
                self._retransmit(inner)
        if is_large:  # on a thread, because the peer may retransmit as well, which this end must read meanwhile
            threading.Thread(target=self._retransmit, args=(inner,), name="djinn-retransmit", daemon=True).start()

    def expire(self) -> None:
        """Forbid reconnection. The current connection continues."""
        self._expired = True

    def close(self) -> None:
        """Close the connection. No further connection follows."""
        self._expired = True
        self._closed = self._closed or "the connection was closed"
        self._inner.close()
