"""Run a session: receive messages, and call their handlers in the order that `SessionMachine` decides."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Final, Protocol

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Frame
from djinn_core.wire import limits
from djinn_core.wire.cancel_messages import CancelSubmissions
from djinn_core.wire.frames import weight
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import Goodbye, Submit, TemplateReply, is_of_kind
from djinn_core.wire.upload_messages import AbortUpload, UploadPart
from djinn_server.malformed import Unreadable, UnreadableTemplate, UnreadableUpload, decode_frame
from djinn_server.recovery.executor_channel import ExecutorChannel
from djinn_server.running.cancellation import CancellationState, ClientLeft, handle_control
from djinn_server.session_machine import FRAME, Cause, Kind, SessionMachine, Step, Wait
from djinn_server.session_pauses import LINGER_SECONDS, OFFER_SECONDS, Pause
from djinn_server.session_threads import SessionThreads
from djinn_server.weights.reads import WeightReads

_PAST: Final = 1e-9  # a deadline that has passed
_UPLOADS_LIMIT: Final = 64  # uploads that are handled between two submissions in lanes
_NO_WAITS: Final[Iterator[Wait]] = iter(())
_KINDS: Final[Mapping[type, Kind]] = {
    UploadPart: Kind.AT_ONCE,
    AbortUpload: Kind.AT_ONCE,
    CancelSubmissions: Kind.AT_ONCE,
    UnreadableUpload: Kind.AT_ONCE,
    TemplateReply: Kind.TEMPLATE,
    UnreadableTemplate: Kind.TEMPLATE,
    Goodbye: Kind.LAST,
}


class MessageHandlers(Protocol):
    """The handlers of a session's messages."""

    def begin(
        self, message: Message | Unreadable, frame: Frame, connection: ExecutorChannel, started: float
    ) -> Iterator[Wait] | None:
        """Handle a message that arrived at `started`, up to its first wait. Return its waits, or None if it never waits."""

    def take_at_once(self, message: Message | Unreadable, frame: Frame) -> None:
        """Handle a message out of order, because the current message may wait for it."""

    def receive_ahead(self, connection: ExecutorChannel) -> Frame | None:
        """Run predicted submissions until a frame arrives. Return the frame, or None if no submission is predicted."""

    @property
    def brief_use(self) -> float | None:
        """Device seconds used so far; None if the next message is expected to take `BRIEF_SECONDS` or more."""

    def between_messages(self, connection: ExecutorChannel) -> None:
        """Do deferred work after a message. Called if no message is queued."""

    def idle_deadline(self) -> float | None:
        """Do the idle session's task if its time has come. Return the next task's time, if any."""


class SessionLoop:
    """Loop over the messages of one session.

    Attributes:
        machine: decides what the session does next.
        is_pooled: True if threads of `SessionThreads` run the session.
    """

    def __init__(
        self,
        handlers: MessageHandlers,
        reads: WeightReads,
        cancellation: CancellationState,
        threads: SessionThreads,
        idle_seconds: float,
    ) -> None:
        """`idle_seconds`: seconds after which an idle session has a task; 0: it has none."""
        self.machine: SessionMachine[tuple[Message | Unreadable, Frame]] = SessionMachine(
            limits.BACKLOG_FRAMES, limits.BACKLOG_BYTES
        )
        self._handlers, self._reads, self._cancellation, self._threads = handlers, reads, cancellation, threads
        self.is_pooled = True
        self._resumed_at = 0.0
        self._used: float | None = None  # `Pause.used` of the next pause
        self._offers = False  # True if the next pause only lets other sessions run
        self._linger = min(LINGER_SECONDS, idle_seconds or LINGER_SECONDS)
        self._waits = _NO_WAITS  # of the handler of the present message
        self._wait = Wait(())  # the present wait of that handler
        self._received_at = 0.0  # when the next message was received, if it was not queued; else 0.0

    def next_frame(self) -> Generator[Wait, None, Frame]:
        """Wait for the next frame, which belongs to the current message, and return it."""
        yield Wait((FRAME,))
        return self.machine.pop()[1]

    def peek(self, connection: ExecutorChannel) -> Message | Unreadable | None:
        """Receive arrived uploads and the submission after them. Return the next queued message, if any."""
        machine, turns = self.machine, self._cancellation.share.turns
        for _ in range(_UPLOADS_LIMIT):
            with contextlib.suppress(TransportError, ProtocolError):  # the session's next wait raises the error
                connection.read_ahead(1, limits.AHEAD_BYTES)
            head = next((frame.head for frame in connection.queued()), b"")
            if turns.waiting or len(machine) or not (is_of_kind(head, Submit) or is_of_kind(head, UploadPart)):
                break
            self._receive(connection)
        message = machine.first()
        return None if message is None else message[0]

    def pauses(self, connection: ExecutorChannel) -> Iterator[Pause]:
        """Handle messages until the client leaves. Yield a pause whenever the session has nothing to do."""
        with contextlib.suppress(ClientLeft):
            machine, client_left = self.machine, self._cancellation.client_left
            try:
                while not client_left.is_set() and (step := machine.next(time.monotonic())) is not Step.END:
                    if step is Step.HANDLE:
                        self._begin(connection)
                    elif step is Step.RESUME:
                        self._threads.promote_follower()
                        self._advance(connection)
                    elif step is Step.WAIT or not self._receive(connection):
                        self._cancellation.busy_since = 0.0
                        yield self._pause(connection, listens=step is Step.RECEIVE)
                        self._resumed_at = time.monotonic()
                        self._note_events(connection)
            finally:
                self._threads.promote_follower()  # the end of a session may take long

    def _begin(self, connection: ExecutorChannel) -> None:
        assert self.machine.current is not None
        message, frame = self.machine.current
        start, self._received_at = self._received_at or time.perf_counter(), 0.0
        self._threads.note_message(id(self))
        if type(message) is not Submit:
            self._threads.promote_follower()
        self._cancellation.busy_since = start
        self._waits = self._handlers.begin(message, frame, connection, start) or _NO_WAITS
        self._advance(connection)

    def _advance(self, connection: ExecutorChannel) -> None:
        """Handle the current message up to its next wait."""
        machine = self.machine
        self._cancellation.busy_since = self._cancellation.busy_since or time.perf_counter()
        wait = next(self._waits, None)
        if (away_until := connection.away_until) is not None:
            machine.connected(away_until)
        if wait is not None:
            self._wait = wait
            machine.wait(wait.missing, wait.until)
            self._note_events(connection)
            return
        machine.ended()
        self._waits = _NO_WAITS
        if not len(machine):
            self._handlers.between_messages(connection)

    def _receive(self, connection: ExecutorChannel) -> bool:
        """Receive a frame, and handle or queue its message. Return False if no frame arrives in time."""
        machine = self.machine
        try:
            frame = self._receive_frame(connection)
        except TimeoutError:
            machine.connected(connection.away_until)
            return False
        now = time.perf_counter()
        if self._reads.reading:
            self._reads.take_finished()
        message = decode_frame(frame)
        if machine.current is None:
            machine.arrived((message, frame))
            self._received_at = now
            return True
        at_once = machine.arrived((message, frame), self._kind_of(message), weight(frame))
        if at_once:
            self._handlers.take_at_once(message, frame)
        elif isinstance(message, Goodbye):
            handle_control(frame.head, self._cancellation, connection)
        self._note_events(connection)
        return True

    def _receive_frame(self, connection: ExecutorChannel) -> Frame:
        """Return the next frame.

        Raises:
            TimeoutError: no frame arrives in time, or the session should leave its thread to other sessions.
        """
        if self.machine.current is not None:
            self._threads.promote_follower()
            return connection.receive(LINGER_SECONDS if self.machine.needs_client else 0.0)
        self._cancellation.busy_since = 0.0
        self._used = self._handlers.brief_use if self.is_pooled else None
        if self._used is not None and self._threads.is_alternating and connection.descriptor() is not None:
            self._offers = time.monotonic() - self._resumed_at >= OFFER_SECONDS
            if self._offers:
                raise TimeoutError
            return connection.receive(0.0)
        self._threads.promote_follower()
        predicted = self._handlers.receive_ahead(connection)
        return connection.receive(self._linger) if predicted is None else predicted

    def _pause(self, connection: ExecutorChannel, *, listens: bool) -> Pause:
        machine = self.machine
        deadline = machine.deadline()
        if machine.current is None and (idle_deadline := self._handlers.idle_deadline()) is not None:
            deadline = idle_deadline if deadline is None else min(deadline, idle_deadline)
        if self._offers:
            deadline = _PAST
        lingers = listens and (machine.current is None or machine.needs_client)
        pause = Pause(deadline, connection if listens else None, lingers=lingers, used=self._used)
        self._used, self._offers = None, False
        return pause

    def _kind_of(self, message: Message | Unreadable) -> Kind:
        if isinstance(message, UnreadableUpload) and message.offered:
            return Kind.IN_ORDER  # an offer needs a reply
        if isinstance(message, UploadPart | AbortUpload | UnreadableUpload) and self._is_next_value(message.handle):
            return Kind.IN_ORDER  # a queued submission may use or free the present value
        return _KINDS.get(type(message), Kind.IN_ORDER)

    def _is_next_value(self, handle: int) -> bool:
        """Return True if an upload must be handled in order: it replaces an existing value, or one of a queued message."""
        if (Cause.UPLOAD, handle) in self.machine.missing:
            return False
        queued = (message for message, _ in self.machine.messages())
        return self._reads.in_use(handle) or any(getattr(message, "handle", None) == handle for message in queued)

    def _note_events(self, connection: ExecutorChannel) -> None:
        """Notify the machine of the events since the last call."""
        machine, wait = self.machine, self._wait
        if machine.away_until is not None:
            machine.connected(connection.away_until)
        if self._reads.reading:
            self._reads.take_finished()
        if machine.missing:
            if wait.cancelled is not None and wait.cancelled():
                machine.cancelled()
            for key in [key for key in machine.missing if wait.has_arrived(key)]:
                machine.key_arrived(key)
