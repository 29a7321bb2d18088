"""Run a session: receive its messages, and call their handlers in the order that `SessionMachine` decides."""

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

_AT_ONCE: Final = 1e-9  # a time that is over
_UPLOADS: Final = 64  # taken between two submissions in lanes, while no other session waits for the device
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
        """Begin to handle a message that arrived at `started`. If the handler may wait, return the rest of it."""

    def take_at_once(self, message: Message | Unreadable, frame: Frame) -> None:
        """Handle a message out of order, because the current message may wait for it."""

    def receive_ahead(self, connection: ExecutorChannel) -> Frame | None:
        """Run predicted submissions until a frame arrives, and return it. None: there is nothing to predict."""

    @property
    def brief_use(self) -> float | None:
        """Return used device seconds if the next message should take less than `BRIEF_SECONDS`, else None."""

    def between_messages(self, connection: ExecutorChannel) -> None:
        """Do work after a message, if no other message waits."""

    def idle_deadline(self) -> float | None:
        """Return the time of the idle session's next task; None: no task. If the time has come, do the task."""


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
        """`idle_seconds`: time after which an idle session has a task; 0: never."""
        self.machine: SessionMachine[tuple[Message | Unreadable, Frame]] = SessionMachine(
            limits.BACKLOG_FRAMES, limits.BACKLOG_BYTES
        )
        self._handlers, self._reads, self._cancellation, self._threads = handlers, reads, cancellation, threads
        self.is_pooled = True
        self._resumed_at = 0.0
        self._used: float | None = None  # as of the next pause
        self._offers = False  # True if the next pause only lets other sessions go on
        self._linger = min(LINGER_SECONDS, idle_seconds or LINGER_SECONDS)
        self._present = _NO_WAITS  # the handler of the present message
        self._wait = Wait(())  # the wait of that handler
        self._received_at = 0.0  # when the message was received that is handled next; 0.0: before it was queued

    def next_frame(self) -> Generator[Wait, None, Frame]:
        """Wait for the next frame, which belongs to the current message, and return it."""
        yield Wait((FRAME,))
        return self.machine.pop()[1]

    def following(self, connection: ExecutorChannel) -> Message | Unreadable | None:
        """Return the next message if it has arrived and is a submission, else None. `machine.pop` removes it."""
        machine, turns = self.machine, self._cancellation.share.turns
        for _ in range(_UPLOADS):
            with contextlib.suppress(TransportError, ProtocolError):  # the session's next wait finds it
                connection.read_ahead(1, limits.AHEAD_BYTES)
            head = next((frame.head for frame in connection.queued()), b"")
            if turns.waiting or len(machine) or not (is_of_kind(head, Submit) or is_of_kind(head, UploadPart)):
                break
            self._receive(connection)
        message = machine.first()
        return None if message is None else message[0]

    def pauses(self, connection: ExecutorChannel) -> Iterator[Pause]:
        """Handle messages until the client leaves. Yield a pause if there is nothing to do."""
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
        started, self._received_at = self._received_at or time.perf_counter(), 0.0
        self._threads.note_message(id(self))
        if type(message) is not Submit:
            self._threads.promote_follower()
        self._cancellation.busy_since = started
        self._present = self._handlers.begin(message, frame, connection, started) or _NO_WAITS
        self._advance(connection)

    def _advance(self, connection: ExecutorChannel) -> None:
        """Handle the current message up to its next wait."""
        machine = self.machine
        self._cancellation.busy_since = self._cancellation.busy_since or time.perf_counter()
        wait = next(self._present, None)
        if (away_until := connection.away_until) is not None:
            machine.connected(away_until)
        if wait is not None:
            self._wait = wait
            machine.wait(wait.missing, wait.until)
            self._note_events(connection)
            return
        machine.ended()
        self._present = _NO_WAITS
        if not len(machine):
            self._handlers.between_messages(connection)

    def _receive(self, connection: ExecutorChannel) -> bool:
        """Receive a frame. Return False if no frame arrives for a while."""
        machine = self.machine
        try:
            frame = self._next(connection)
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

    def _next(self, connection: ExecutorChannel) -> Frame:
        """Return the next frame.

        Raises:
            TimeoutError: no frame arrives for a while.
        """
        if self.machine.current is not None:
            self._threads.promote_follower()
            return connection.receive(LINGER_SECONDS if self.machine.needs_client else 0.0)
        self._cancellation.busy_since = 0.0
        self._used = self._handlers.brief_use if self.is_pooled else None
        if self._used is not None and self._threads.alternate and connection.descriptor() is not None:
            self._offers = time.monotonic() - self._resumed_at >= OFFER_SECONDS
            if self._offers:
                raise TimeoutError
            return connection.receive(0.0)
        self._threads.promote_follower()
        expected = self._handlers.receive_ahead(connection)
        return connection.receive(self._linger) if expected is None else expected

    def _pause(self, connection: ExecutorChannel, *, listens: bool) -> Pause:
        machine = self.machine
        deadline = machine.deadline()
        if machine.current is None and (idle := self._handlers.idle_deadline()) is not None:
            deadline = idle if deadline is None else min(deadline, idle)
        if self._offers:
            deadline = _AT_ONCE
        lingers = listens and (machine.current is None or machine.needs_client)
        pause = Pause(deadline, connection if listens else None, lingers=lingers, used=self._used)
        self._used, self._offers = None, False
        return pause

    def _kind_of(self, message: Message | Unreadable) -> Kind:
        if isinstance(message, UnreadableUpload) and message.offered:
            return Kind.IN_ORDER  # an offer needs a reply
        if isinstance(message, UploadPart | AbortUpload | UnreadableUpload) and self._is_next_value(message.handle):
            return Kind.IN_ORDER  # a queued submission may use the present value, and free it
        return _KINDS.get(type(message), Kind.IN_ORDER)

    def _is_next_value(self, handle: int) -> bool:
        """Return True if an uploaded value replaces the present value of that handle, or one that a queued message makes."""
        if (Cause.UPLOAD, handle) in self.machine.missing:
            return False
        queued = (message for message, _ in self.machine.messages())
        return self._reads.in_use(handle) or any(getattr(message, "handle", None) == handle for message in queued)

    def _note_events(self, connection: ExecutorChannel) -> None:
        """Tell the machine which events happened since the last call."""
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
