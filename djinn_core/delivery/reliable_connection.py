"""Reliable connection: frames that were not acknowledged are sent again over the next connection after a break."""

from __future__ import annotations

import abc
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from djinn_core.errors import TransportError
from djinn_core.hookspecs.transports import Connection, Frame, Limits
from djinn_core.interrupts import held
from djinn_core.logs import get_logger
from djinn_core.wire.numbering import AckFlags, Inbox, Numbered, Outbox, Prefix, numbered, split

_NOTE_FRAMES: Final = 32  # taken without a word, before a note says so
_NOTE_BYTES: Final = 1 << 20
_ANSWERED_BYTES: Final = 64 << 10  # a body of this size is acknowledged at once: the other end keeps its memory for us
_MUCH_BYTES: Final = 128 << 10  # less fits into the buffers of a socket
_LARGEST_WINDOW: Final = 32 << 20
_SMALLEST_WINDOW: Final = 4 << 20
_AHEAD_FRAMES: Final = 64  # that a thread looking for notes takes in
_TURN_SECONDS: Final = 0.05
_FIRST_PROBE_SECONDS: Final = 0.05
_LONGEST_PROBE_SECONDS: Final = 2.0
_log = get_logger("djinn.delivery")


class NotYet(TimeoutError):  # noqa: N818 - a signal within this file and those above it
    """Raised while there is no new connection yet and an interrupt is held back; the next operation tries again."""


def nothing(_: int) -> None:
    """Say nothing to the other end of a new connection."""


class SuccessiveConnection(abc.ABC):
    """Base of session channels that run over one transport connection after the other; buffers that are sent are borrowed."""

    def __init__(self, inner: Connection) -> None:
        self._inner = inner
        self._limits = inner.limits
        self._past_sent = self._past_received = 0  # bytes of connections before this one

    @property
    def limits(self) -> Limits:
        """As `Connection.limits`."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = self._inner.limits = limits

    @property
    def bytes_sent(self) -> int:
        """As `Connection.bytes_sent`, over all connections so far."""
        return self._past_sent + self._inner.bytes_sent

    @property
    def bytes_received(self) -> int:
        """As `Connection.bytes_received`, over all connections so far."""
        return self._past_received + self._inner.bytes_received

    def _follow(self, inner: Connection) -> None:
        """Switch to the connection `inner`."""
        before, self._inner = self._inner, inner
        inner.limits = self._limits
        self._past_sent += before.bytes_sent
        self._past_received += before.bytes_received

    @abc.abstractmethod
    def own(self) -> None:
        """The memory of what was sent is about to change: what was not taken yet is copied."""

    @abc.abstractmethod
    def expire(self) -> None:
        """There will be no further connection; the one that there is goes on."""


class ReliableConnection(SuccessiveConnection):
    """Implements `SessionChannel` over one connection after the other. What is sent arrives once, and in order.

    `send` may be called from several threads, `receive` from one at a time.
    """

    def __init__(self, inner: Connection) -> None:
        super().__init__(inner)
        self._outbox = Outbox()
        self._inbox = Inbox()
        # In this order; the last one is never held while anything waits.
        self._reading = threading.RLock()  # held by the one who reads
        self._sending = threading.RLock()  # around what is numbered and put on the wire
        self._taking = threading.Lock()  # around counting what was read
        self._keeping = threading.Lock()  # around the outbox
        self._early: deque[Frame] = deque()  # read by a sender who looked for notes
        self._frames = self._bytes = 0  # taken since the other end was last told
        self._asked_again = False
        self._unrepeated: Connection | None = None  # over which nothing was sent again yet
        self._closed = ""  # why nothing can be sent any more
        self._expired = False
        self._probe = _FIRST_PROBE_SECONDS
        self._probe_at: float | None = (
            None  # when the other end is asked next how far it is, where something is awaited
        )
        self._window = _LARGEST_WINDOW  # bytes that may be under way

    # --- out --------------------------------------------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        """As `Connection.send`; but its buffers are borrowed until they were taken or `own` is called.

        Raises:
            TransportError: there will be no further connection.
        """
        if self._closed:
            raise TransportError(self._closed)
        with held:  # once it has a number, it is sent, now or after an interrupt
            try:
                with self._sending:
                    inner = self._inner
                    with self._keeping:
                        number = self._outbox.put(frame)
                    if self._outbox.repeats:
                        return
                    if self._unrepeated is not inner:  # else what was sent before comes first, and this after it
                        self._put_on_wire(inner, number, frame)
            except TransportError as error:  # outside of the lock, which is not held while a connection is awaited
                with contextlib.suppress(NotYet):
                    self._restore(inner, error)
                return
            if frame.body and self._outbox.borrows:
                with contextlib.suppress(NotYet):
                    self._look()
                    self._hold_back()

    def own(self) -> None:
        """The memory of what was sent is about to change: what was not taken yet is copied."""
        if self._outbox.borrows:
            self._look()
            self._copy_borrowed()

    def _copy_borrowed(self) -> None:
        with self._sending, self._keeping:  # no other thread sends it again from there now
            self._outbox.own()

    def _put_on_wire(self, inner: Connection, number: int, frame: Frame) -> None:
        """Send a frame with its number."""
        self._frames = self._bytes = 0
        inner.send(Frame(numbered(number, self._inbox.taken, frame.head), frame.body))

    def _note(self, wish: AckFlags = AckFlags.NOTHING, asked: int = 0) -> None:
        """Send an acknowledgement, unless another thread is just sending: its frame carries one."""
        if self._sending.acquire(blocking=False):
            try:
                self._frames = self._bytes = 0
                self._inner.send(Frame(Prefix(self._outbox.sent, self._inbox.taken, wish, asked).encode()))
            except TransportError as error:
                _log.debug("a note was not sent", reason=str(error))  # the next reader finds out
            finally:
                self._sending.release()

    def _again(self, inner: Connection) -> None:
        """Send what was not taken once more."""
        with self._sending:
            self._unrepeated = None
            with self._keeping:
                kept = self._outbox.kept()
            with contextlib.suppress(TransportError):  # the next reader or sender finds out
                for number, frame in kept:
                    if inner is not self._inner:
                        return
                    self._put_on_wire(inner, number, frame)

    # --- in ---------------------------------------------------------------------------------------------------

    def receive(self, timeout: float | None = None) -> Frame:
        """As `Connection.receive`.

        Raises:
            TimeoutError: nothing came in time.
            ProtocolError: the other end does not follow the protocol.
            TransportError: there will be no further connection.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._reading.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(f"another thread is receiving, for {timeout} s and longer")
        try:
            while True:
                if self._early:
                    return self._early.popleft()
                try:
                    frame = self._take(self._turn(deadline))
                except TimeoutError:
                    self._probe_if_due()
                    if deadline is not None and time.monotonic() >= deadline:
                        raise
                    continue
                if frame is not None:
                    self._probe, self._probe_at = _FIRST_PROBE_SECONDS, None
                    return frame
        finally:
            self._reading.release()

    def _turn(self, deadline: float | None) -> float | None:
        """Seconds to wait at a time."""
        now = time.monotonic()
        until = deadline
        if self._probes:
            if self._probe_at is None:
                self._probe_at = now + self._probe
            until = self._probe_at if until is None else min(until, self._probe_at)
        return None if until is None else max(0.0, until - now)

    def _probe_if_due(self) -> None:
        now = time.monotonic()
        if self._probe_at is not None and now >= self._probe_at:
            self._note(AckFlags.ANSWER)
            self._probe = min(2 * self._probe, _LONGEST_PROBE_SECONDS)
            self._probe_at = now + self._probe

    def read_ahead(self, frames: int, nbytes: int) -> list[Frame]:
        """Take in what came, for `receive`, unless another thread reads; at most so much may wait there. What is new of it.

        Raises:
            ProtocolError: the other end does not follow the protocol.
            TransportError: the connection is broken. That is left to those who send and receive.
        """
        found: list[Frame] = []
        if not self._reading.acquire(blocking=False):
            return found
        try:
            while len(self._early) < frames and sum(_bytes_of(frame) for frame in self._early) < nbytes:
                frame = self._read(self._inner, 0.0)
                if frame is not None:
                    self._early.append(frame)
                    found.append(frame)
        except TimeoutError:
            return found
        finally:
            self._reading.release()
        return found

    @property
    @abc.abstractmethod
    def _probes(self) -> bool:
        """True if this end probes for the other end's acknowledgement while it waits."""

    def _take(self, timeout: float | None) -> Frame | None:
        """One frame off the wire; None where it is not for the reader, or there is a new connection to read."""
        inner = self._inner
        if self._closed:
            raise TransportError(self._closed)
        try:
            return self._read(inner, timeout)
        except TransportError as error:
            self._restore(inner, error)
            return None

    def _read(self, inner: Connection, timeout: float | None) -> Frame | None:
        """One frame off a connection; None where it is not for the reader."""
        frame = inner.receive(timeout)
        prefix, head = split(frame)
        with self._taking:
            if inner is not self._inner:
                return None  # it comes again over the new one, which was told that it was not taken
            with self._keeping:
                self._outbox.acknowledge(prefix.taken)
            judged = self._inbox.judge(prefix.number) if head else None
            if judged is Numbered.NEXT:
                taken = self._took(Frame(head, frame.body))
                self._inbox.take()
        if judged is None:
            self._heed(prefix, inner)
        elif judged is Numbered.AHEAD:
            self._ask_again()
        elif judged is Numbered.NEXT:
            self._asked_again = False
            self._count(frame)
            return taken
        return None

    def _took(self, frame: Frame) -> Frame:
        """A frame is taken, and goes on as what this returns: what has to be done before the other end may hear of it."""
        return frame

    def _count(self, frame: Frame) -> None:
        nbytes = _bytes_of(frame) if frame.body else 0
        self._frames += 1
        self._bytes += nbytes
        if nbytes >= _ANSWERED_BYTES or self._frames >= _NOTE_FRAMES or self._bytes >= _NOTE_BYTES:
            self._note()

    def _heed(self, note: Prefix, inner: Connection) -> None:
        """Handle a note: do what it asks, and detect lost frames from it."""
        answer = AckFlags.ANSWERED if note.wish & AckFlags.ANSWER else AckFlags.NOTHING
        if self._inbox.misses(note.number):
            answer |= AckFlags.AGAIN  # also where it was asked for before: that may have been lost as well
        if answer:
            self._note(answer, note.number)
        lost = note.wish & AckFlags.ANSWERED and self._outbox.sent_after(note.taken, note.asked)
        if lost or note.wish & AckFlags.AGAIN:
            self._again(inner)

    def _ask_again(self) -> None:
        """Something did not arrive. It is asked for once; if that is lost, too, the next probe finds it."""
        if not self._asked_again:
            self._asked_again = True
            self._note(AckFlags.AGAIN)

    def _look(self) -> None:
        """Take in acknowledgements, unless another thread reads."""
        if self._reading.acquire(blocking=False):
            try:
                while len(self._early) < _AHEAD_FRAMES:
                    frame = self._take(0.0)
                    if frame is not None:
                        self._early.append(frame)
                    elif not self._outbox.borrows:
                        return
            except TimeoutError:
                return
            finally:
                self._reading.release()

    def _hold_back(self) -> None:
        """Wait while more is under way than may be lost at once, unless an interrupt is held back."""
        while self._outbox.nbytes > self._window and not self._closed and not held.pending:
            if not self._reading.acquire(timeout=_TURN_SECONDS):
                continue  # the thread that reads takes in acknowledgements
            try:
                frame = self._take(_TURN_SECONDS)
                if frame is not None:
                    self._early.append(frame)
                    self._check_ahead()
            except TimeoutError:
                self._note(AckFlags.ANSWER)
            finally:
                self._reading.release()

    def _check_ahead(self) -> None:
        """Check that no more frames came than may wait while this end sends. Here, all that come were asked for.

        Raises:
            ProtocolError: more came.
        """

    # --- from one connection to the next -----------------------------------------------------------------------

    @abc.abstractmethod
    def _restore(self, broken: Connection, error: TransportError) -> None:
        """Return when there is another connection than `broken`.

        Raises:
            TransportError: there will be none.
            NotYet: there is none yet.
        """

    def _retire(self) -> int:
        """Take nothing more from the connection that there is; how many frames were taken."""
        with self._taking:
            self._inner.close()
            return self._inbox.taken

    def _adopt(self, inner: Connection, taken: int, greet: Callable[[int], None] = nothing) -> None:
        """Go on over `inner`, of which the other end has taken so many frames before.

        `greet` is told how many frames this end has taken, before anything is sent.

        Raises:
            ProtocolError: the other end cannot have taken that many.
            TransportError: `greet` could not say so.
        """
        self._inner.close()  # a thread inside `send` gets out of it
        with self._sending:
            with self._taking:
                self._follow(inner)
                self._asked_again = False
                self._window = max(_SMALLEST_WINDOW, self._window // 4)  # a network that breaks loses what is under way
                mine = self._inbox.taken
            with self._keeping:
                self._outbox.acknowledge(taken)
                much = self._outbox.nbytes > _MUCH_BYTES
            greet(mine)
            self._unrepeated = inner
            if not much:
                self._again(inner)
        if much:  # the other end may have as much to repeat: this one has to be able to read meanwhile
            threading.Thread(target=self._again, args=(inner,), name="djinn-again", daemon=True).start()

    def expire(self) -> None:
        """There will be no further connection; the one that there is goes on."""
        self._expired = True

    def close(self) -> None:
        """As `Connection.close`; there will be no further one."""
        self._expired = True
        self._closed = self._closed or "the connection was closed"
        self._inner.close()


def _bytes_of(frame: Frame) -> int:
    nbytes = 0
    for buffer in frame.body:  # mostly one: no generator for it
        nbytes += memoryview(buffer).nbytes
    return nbytes
