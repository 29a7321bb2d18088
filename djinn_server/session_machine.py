"""State machine that decides what a session does next. It uses no sockets, threads, clocks or torch.

Events are method calls: a message or a key arrived, the current message ended or was cancelled, the connection broke or
was restored. `next` returns the next step. A message that waits lists the keys that are missing. Later messages queue,
except those that must be handled at once because the current message may wait for them.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Final, Generic, TypeVar

import attrs

from djinn_core.errors import ProtocolError

M = TypeVar("M")


class Cause(enum.Enum):
    """Kinds of events for which a message can wait."""

    UPLOAD = "upload"
    TEMPLATE = "template"
    FRAME = "frame"
    READ = "read"
    OPENING = "opening"
    TRANSFER = "transfer"
    ROOM = "room"
    CLIENT = "client"


Key = tuple[Cause, int]  # an awaited event: its cause, and a handle or another number
FROM_CLIENT: Final = frozenset({Cause.UPLOAD, Cause.TEMPLATE, Cause.FRAME})
TEMPLATE: Final[Key] = (Cause.TEMPLATE, 0)
FRAME: Final[Key] = (Cause.FRAME, 0)
CLIENT: Final[Key] = (Cause.CLIENT, 0)  # disconnected, with too many unsent replies


class Kind(enum.Enum):
    """How a session treats a message that arrives while another message waits."""

    IN_ORDER = "it queues"
    AT_ONCE = "it is handled now"
    TEMPLATE = "it queues until its template is requested"
    LAST = "it queues, and no message follows"


class Step(enum.Enum):
    """What a session does next."""

    HANDLE = "begin to handle the message `current`"
    RESUME = "go on with the message `current`"
    RECEIVE = "receive a frame, or wait until one of the events"
    WAIT = "receive nothing, and wait until one of the events"
    END = "end the session: the client has left"


@attrs.frozen
class Wait:
    """A wait of a message handler.

    Attributes:
        missing: keys for which it waits.
        until: end of the wait, on the clock of `SessionMachine.next`; None: no end.
        has_arrived: returns True if a key has arrived without a message.
        cancelled: returns True if the message was cancelled; None: the message cannot be cancelled.
    """

    missing: Collection[Key]
    until: float | None = None
    has_arrived: Callable[[Key], bool] = lambda _: False
    cancelled: Callable[[], bool] | None = None


@attrs.define(eq=False)
class SessionMachine(Generic[M]):
    """State of one session's messages. Every method except `next` notes an event or reads the state.

    Attributes:
        most_frames, most_bytes: limits of the queue. The queue may exceed `most_bytes` by one message.
        current: message that the session handles now; None between messages.
        missing: keys for which the current message waits.
        until: time at which the current message continues without these keys; None: never.
        away_until: time until which a disconnected client may reconnect; None while it is connected.
        nbytes: bytes of the queued messages.
    """

    most_frames: int
    most_bytes: int
    current: M | None = None
    missing: set[Key] = attrs.field(factory=set)
    until: float | None = None
    away_until: float | None = None
    nbytes: int = 0
    _queue: deque[tuple[M, int, Kind]] = attrs.field(factory=deque)
    _is_last: bool = False  # True once no message follows
    _has_left: bool = False

    def __len__(self) -> int:
        return len(self._queue)

    def arrived(self, message: M, kind: Kind = Kind.IN_ORDER, nbytes: int = 0) -> bool:
        """Note the arrival of a message. Return True if the session must handle it now, out of order.

        Raises:
            ProtocolError: the queue is full.
        """
        if self.current is not None and kind is Kind.AT_ONCE:
            return True
        if len(self._queue) >= self.most_frames or self.nbytes >= self.most_bytes:
            raise ProtocolError(
                f"the client sent {len(self._queue):,} messages of {self.nbytes:,} bytes instead of the template or upload that the "
                f"executor waits for; the limits are {self.most_frames:,} messages and {self.most_bytes:,} bytes"
            )
        self._is_last = self._is_last or kind is Kind.LAST
        self._queue.append((message, nbytes, kind))
        self.nbytes += nbytes
        return False

    def wait(self, missing: Collection[Key], until: float | None = None) -> None:
        """Note that the current message waits for keys, at most until `until`."""
        self.missing, self.until = set(missing), until

    def key_arrived(self, key: Key) -> None:
        """Note the arrival of a key, such as an upload or a transfer, for which the current message waits."""
        self.missing.discard(key)

    def cancelled(self) -> None:
        """Note that the current message was cancelled, and end its wait."""
        self.missing.clear()

    def ended(self) -> None:
        """Note that the current message was handled."""
        self.current, self.until = None, None
        self.missing.clear()

    def connected(self, away_until: float | None) -> None:
        """Set the time until which a disconnected client may reconnect. None: it is connected, or this time is over."""
        self.away_until = away_until

    def left(self) -> None:
        """Note that the client sent `Goodbye`."""
        self._has_left = True

    def close(self) -> None:
        """Discard all queued messages."""
        self._queue.clear()
        self.nbytes = 0

    def first(self) -> M | None:
        """Return the next message of the queue without removing it, or None if the queue is empty."""
        return self._queue[0][0] if self._queue else None

    def messages(self) -> Iterator[M]:
        """Return the messages of the queue, in order."""
        return (message for message, _, _ in self._queue)

    def pop(self) -> M:
        """Remove and return the next message of the queue."""
        message, nbytes, _ = self._queue.popleft()
        self.nbytes -= nbytes
        return message

    def template(self) -> M:
        """Remove and return the first template of the queue. In a replay, the template may arrive early."""
        index = next(i for i, (_, _, kind) in enumerate(self._queue) if kind is Kind.TEMPLATE)
        message, nbytes, _ = self._queue[index]
        del self._queue[index]
        self.nbytes -= nbytes
        return message

    def next(self, now: float) -> Step:
        """Return the next step of the session."""
        if self._has_left:
            return Step.END
        if self.current is not None:
            return self._next_of_current(now)
        if self.away_until is not None and now < self.away_until:
            return Step.WAIT
        if not self._queue:
            return Step.RECEIVE
        self.current = self.pop()
        return Step.HANDLE

    def _next_of_current(self, now: float) -> Step:
        missing = self.missing
        if not missing or (self.until is not None and now >= self.until) or (self._queue and FRAME in missing):
            return Step.RESUME
        if TEMPLATE in missing and any(kind is Kind.TEMPLATE for _, _, kind in self._queue):
            return Step.RESUME
        if self.away_until is not None and now < self.away_until:
            return Step.WAIT
        if self._is_last:
            return Step.END if self.needs_client else Step.WAIT
        # Stop at half of the limits: a queued submission may have to wait for a later message.
        is_half_full = 2 * len(self._queue) >= self.most_frames or 2 * self.nbytes >= self.most_bytes
        return Step.WAIT if is_half_full and not self.needs_client else Step.RECEIVE

    @property
    def needs_client(self) -> bool:
        """True if the current message waits for a message of the client."""
        return any(cause in FROM_CLIENT for cause, _ in self.missing)

    def deadline(self) -> float | None:
        """Return the time at which `next` may return another step without an event, or None without a timeout."""
        times = [time for time in (self.until, self.away_until) if time is not None]
        return min(times, default=None)
