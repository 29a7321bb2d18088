"""Replies of an executor: unanswered submissions, received results, and waiting threads."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Sequence
from threading import get_ident
from typing import Any, Final, TypeVar

from djinn_client.interception.deadlines import deadline_error, wait_deadline
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.tap import Cause, cause_of_wait, taps
from djinn_client.runtime.executor_link import ExecutorLink
from djinn_client.runtime.receiving.reply_reader import ReplyReader
from djinn_client.runtime.sending.binding import PendingSubmission, confirm_claims
from djinn_client.runtime.sending.cancellation import Cancellation, cancelled_error
from djinn_client.runtime.stats import Stats
from djinn_client.sink import SubmissionReply
from djinn_core.errors import DeadlineExceeded, ProtocolError, SessionLost, TransportError
from djinn_core.hookspecs.transports import Buffer, Frame
from djinn_core.system.gc_pause import collect_later
from djinn_core.system.interrupts import LOOK_SECONDS, interrupt_mask, require_stack_room
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import Completed, ProtocolClose, Room, decode, encode
from djinn_core.wire.peer_messages import LinkMeasurement

M = TypeVar("M", bound=Message)
Handler = Callable[[Any, Sequence[Buffer]], None]  # handles a message of its kind, and the body of its frame

# Seconds of waiting after which locks are released, so that interrupts and other threads get a turn.
PATIENCE = LOOK_SECONDS

# Bytes. While an executor sends a larger reply that no thread reads, it may not read, either.
LARGE_BYTES: Final = 2048
# Bytes that fit into the buffers of every kind of connection. A send of these never waits for the other end.
ROOM_BYTES: Final = 64 << 10
_SAMPLES: Final = 16  # number of recent round trips of which the minimum counts
SAMPLED_AT_FIRST: Final = 64  # number of lone submissions whose round trips are all measured
SAMPLED_EVERY: Final = 8  # afterwards one of this number is measured


class DeferredReplies:
    """Replies that the program will read later, and the number of bytes that the executor has read.

    Attributes:
        numbers: numbers of the submissions with deferred replies.
        read: number of bytes that the executor has read from the connection.
        large: submissions with large deferred replies, oldest first.
        discarded: numbers of submissions whose deferred replies are not needed.
    """

    def __init__(self) -> None:
        self.large: deque[int] = deque()
        self.numbers: set[int] = set()
        self.discarded: deque[int] = deque()  # finalizers only append
        self.read = 0

    def defer(self, number: int, nbytes: int) -> None:
        """Defer the reply to submission `number`, of `nbytes` bytes."""
        self.numbers.add(number)
        if nbytes > LARGE_BYTES:
            self.large.append(number)

    def discard(self, number: int) -> None:
        """Mark a deferred reply as not needed."""
        self.discarded.append(number)

    def blocked_by(self, position: int, pending: Container[int]) -> int | None:
        """Return the number of a submission whose large reply must be read before bytes up to `position` are sent, or None if none must.

        `pending`: numbers of the unanswered submissions.
        """
        while self.large and self.large[0] not in pending:
            self.large.popleft()
        return self.large[0] if self.large and position - self.read > ROOM_BYTES else None

    def take_discarded(self) -> list[int]:
        """Return the numbers in `discarded`, and forget these replies."""
        numbers: list[int] = []
        while self.discarded:
            number = self.discarded.popleft()
            self.numbers.discard(number)
            numbers.append(number)
        return numbers


class RoundTrips:
    """Round-trip time of the link: the recent minimum over lone submissions, without the server's own time.

    Attributes:
        last_lone: the last submission that was sent while no other was pending, and its send time (`time.perf_counter`).
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self.last_lone = 0, 0.0

    @property
    def seconds(self) -> float | None:
        """Round-trip time in seconds, or None before the first measurement."""
        return min(self._samples, default=None)

    def record(self, number: int, server_seconds: float) -> None:
        """Record a reply that a thread has waited for. The server spent `server_seconds` of the wait."""
        lone_number, began = self.last_lone
        if lone_number == number:
            seconds = time.perf_counter() - began - server_seconds
            self._samples.append(max(0.0, seconds))


class UploadOffers:
    """Offers of uploads that the executor has not answered, or whose bytes it needs.

    Attributes:
        open: offers by handle.
        unanswered_queries: digests of each query without a reply.
        unsent: handles with bytes that the executor needs, oldest first.
        send_wanted: sends these bytes. The executor does not reply before it has them.
    """

    def __init__(self) -> None:
        self.open: dict[int, Any] = {}
        self.unanswered_queries: deque[list[bytes]] = deque()
        self.unsent: deque[int] = deque()
        self.send_wanted: Callable[[], None] = _nothing


class Replies:
    """Read the executor's messages, on the thread that waits for a message.

    Attributes:
        pending: the unanswered submissions by number, oldest first.
        reader: decodes replies.
        abandoned: numbers of submissions for whose replies no thread waits any more.
        deferred: deferred replies.
        offers: upload offers.
        cancellation: stops submissions.
        while_waiting: called after every `PATIENCE` seconds of a wait in which no message arrived.
        on_link_measurements: called with the executor's measurements of its links to other executors.
        on_headroom: called when the executor reports the memory that the session can use.
    """

    def __init__(self, link: ExecutorLink, reader: ReplyReader, stats: Stats) -> None:
        self.pending: OrderedDict[int, PendingSubmission] = OrderedDict()
        self.cancellation = Cancellation(link, self.pending)
        self.while_waiting: Callable[[], None] = _nothing
        self.on_link_measurements: Callable[[Sequence[LinkMeasurement]], None] = _ignored
        self.on_headroom: Callable[[Room], None] = _ignored
        self.reader = reader
        self._link = link
        self._stats = stats
        self._handlers: dict[type[Message], Handler] = {ProtocolClose: self._closed}
        self.offers = UploadOffers()
        self._early_replies: dict[int, tuple[Completed, Sequence[Buffer], bool, float, float]] = {}
        self.abandoned: set[int] = set()
        self._dropped: set[int] = set()
        self.deferred = DeferredReplies()
        self._round_trips = RoundTrips()
        self._executor_seconds = 0.0  # seconds that the executor has spent
        self._answers: list[Message] = []  # replies to questions
        self._answers_to_drop = 0  # expected replies to interrupted questions
        self._questions: deque[Message] = deque()  # unanswered questions

    def handle(self, kind: type[Message], handler: Handler) -> None:
        """Register `handler` for messages of a kind."""
        self._handlers[kind] = handler

    # --- submissions ---------------------------------------------------------------------------------------------

    def expect(self, number: int, pending: PendingSubmission) -> None:
        """Record that submission `number` is being sent."""
        if not self.pending and (number < SAMPLED_AT_FIRST or number % SAMPLED_EVERY == 0):
            self._round_trips.last_lone = number, time.perf_counter()
        self.pending[number] = pending

    def await_reply(self, number: int) -> None:
        """Wait for the reply to submission `number`, so that more can be sent.

        The program waits for this round trip.
        """
        begun = self._begin_round_trip()
        self.receive_until(number)
        self.notify_waited(begun, number, Cause.FULL)

    def _begin_round_trip(self) -> float:
        self._stats.round_trips += 1
        return time.perf_counter()

    def notify_waited(self, start_time: float, number: int = 0, cause: Cause | None = None) -> None:
        """Notify taps of a round trip for which the program has waited since `start_time`.

        `number`: number of the submission, or 0 for a question. `cause`: by default, the cause that the thread has set.
        """
        for notify in taps.waited:
            notify(cause or cause_of_wait(), start_time, self.reader.number, number)

    def make_room(self, nbytes: int) -> None:
        """Read large deferred replies so that the executor, which may be busy sending them, can read `nbytes` more bytes."""
        position = self._link.channel.bytes_sent + nbytes
        while (number := self.deferred.blocked_by(position, self.pending)) is not None:
            self.await_reply(number)

    def wait(self, number: int) -> SubmissionReply:
        """Wait for the requested values: one round trip.

        Raises:
            RemoteError: a requested value could not be computed, or any op failed before a synchronization.
            SessionLost: the executor is gone.
            DeadlineExceeded: the deadline of this thread has passed.
        """
        if not interrupt_mask.depth and get_ident() == interrupt_mask.main:
            with interrupt_mask:
                return self.wait(number)
        deferred = self.deferred
        is_deferred, has_arrived = number in deferred.numbers, number not in self.pending
        is_round_trip = not (is_deferred and has_arrived)  # also if another thread has read the reply meanwhile
        self._stats.round_trips += is_round_trip
        begun = time.perf_counter() if taps.waited else 0.0
        try:
            if not has_arrived:
                is_limited = device_state.wait_timeout or device_state.thread.waits_until is not None
                self.receive_until(number, wait_deadline() if is_limited else None, is_program_waiting=True)
        except BaseException:
            if not is_deferred:  # a deferred reply may be awaited again
                self.abandoned.add(number)
            raise
        if begun and is_round_trip:
            self.notify_waited(begun, number)
        completed, body, synchronize, total_seconds, seconds = self._early_replies.pop(number)
        if is_deferred:
            deferred.numbers.discard(number)
        if not has_arrived and self._round_trips.last_lone[0] == number:
            self._round_trips.record(number, seconds)
        reader = self.reader
        tensors = reader.tensors(completed, body)
        descriptions = reader.described(completed) if completed.described else ()
        if reader.failures.unreported:
            failures = reader.failures
            error = failures.take_unreported() if synchronize else failures.take_check((reader.number, number))
            if error is not None:
                raise error
        return SubmissionReply(tensors, descriptions, total_seconds)

    def discard(self, number: int) -> None:
        """Discard the deferred reply to submission `number` on arrival. Finalizers may call this."""
        self.deferred.discard(number)

    def abandon(self, number: int) -> None:
        """Discard the reply to submission `number` on arrival, because its thread no longer waits."""
        self.abandoned.add(number)

    def mark_unobserved(self, number: int) -> None:
        """Do not report errors of submissions that this thread sent after this one, unless the program uses their results."""
        with interrupt_mask, collect_later, self._link.read_lock:
            self.cancellation.mark_unobserved_after(number)
            self.reader.failures.mark_unobserved((self.reader.number, number))

    def has_arrived(self, number: int) -> bool:
        """Return True if `wait` would not block. This reads replies that have arrived, and never blocks."""
        require_stack_room()
        if number in self.pending and not self._link.lost:
            try:
                with interrupt_mask, collect_later:
                    self._read_pending(lambda: number in self.pending)
            except SessionLost:
                return True  # `wait` raises the reason
        return number not in self.pending or bool(self._link.lost)

    @property
    def round_trip_seconds(self) -> float | None:
        """Return the network round trip in seconds, without the executor's own time, or None if unknown."""
        return self._round_trips.seconds

    # --- questions -----------------------------------------------------------------------------------------------

    def ask(self, question: Message, kind: type[M], until: float | None = None) -> M:
        """Send `question`, and return the reply, a message of the class `kind`: one round trip.

        The caller holds the sink's lock.

        Raises:
            SessionLost: the executor is gone.
            DeadlineExceeded: the executor did not reply before `until`.
        """
        begun = self._begin_round_trip()
        self._handlers.setdefault(kind, self._replied)
        with interrupt_mask, collect_later, self._link.read_lock:
            self._questions.append(question)
            try:
                self.send(question)
            except BaseException:
                self._questions.pop()
                raise
            try:
                while not self._answers:
                    interrupt_mask.check()
                    self._receive_one(self._wait_seconds(until))
            except (KeyboardInterrupt, DeadlineExceeded):
                self._answers_to_drop += 1
                raise
            reply = self._answers.pop()
        self.notify_waited(begun)
        if not isinstance(reply, kind):
            self._link.lose(
                ProtocolError(f"the executor answered {type(question).__name__} with {type(reply).__name__}")
            )
        return reply

    def awaits(self, *kinds: type[Message]) -> bool:
        """Return True if a message of one of these classes is unanswered, even if Ctrl-C interrupted its caller.

        Any thread may call this.
        """
        return any(isinstance(question, kinds) for question in list(self._questions))

    def _replied(self, reply: Message, _: Sequence[Buffer]) -> None:
        if self._questions:
            self._questions.popleft()
        if self._answers_to_drop:
            self._answers_to_drop -= 1
        else:
            self._answers.append(reply)

    def send_and_await(self, message: Message, complete: Callable[[], bool]) -> None:
        """Send a message, and receive messages until `complete` returns True.

        Ctrl-C takes effect afterwards. The caller holds the sink's lock.

        Raises:
            SessionLost: the executor is gone.
        """
        begun = self._begin_round_trip()
        with interrupt_mask.uninterruptible, collect_later, self._link.read_lock:
            self.send(message)
            while not complete():
                self._receive_one(PATIENCE)
        self.notify_waited(begun)

    def send(self, message: Message) -> None:
        """Send a message between submissions. The caller holds the sink's lock.

        Raises:
            SessionLost: the executor is gone.
        """
        frame = Frame(encode(message))
        self.make_room(len(frame.head))
        self._link.send(frame)

    # --- reading -------------------------------------------------------------------------------------------------

    def receive_until(self, number: int, deadline: float | None = None, is_program_waiting: bool = False) -> None:
        """Read messages until submission `number` is answered.

        `is_program_waiting`: True if the program itself waits for the reply.

        Raises:
            DeadlineExceeded: the reply did not arrive before `deadline`.
            ProgramStopped: `djinn.cancel` was called, and the program waits for the reply.
            KeyboardInterrupt: Ctrl-C came. Inside `uninterruptible`, it ends the wait by stopping this thread's
                submissions.
        """
        is_stopped = False
        link = self._link
        while number in self.pending:
            if interrupt_mask.caught is not None:
                interrupt_mask.check()
                if interrupt_mask.pending and not is_stopped:
                    self.cancellation.stop_waiting()
                    is_stopped = True
            if is_program_waiting and number in self.cancellation.cancelled:
                raise cancelled_error(link.server)
            seconds_left = self._wait_seconds(deadline)
            if link.read_lock.acquire(timeout=seconds_left):
                try:
                    if collect_later.thread.depth:
                        if number in self.pending:
                            self._receive_one(seconds_left)
                    else:
                        with collect_later:
                            if number in self.pending:
                                self._receive_one(seconds_left)
                finally:
                    link.read_lock.release()
            if number in self.pending:
                collect_later.catch_up()

    def _wait_seconds(self, deadline: float | None) -> float:
        """Return the seconds to wait before the next check.

        Raises:
            DeadlineExceeded: `deadline` has passed. The executor stops this thread's submissions.
        """
        seconds_left = PATIENCE if deadline is None else min(deadline - time.monotonic(), PATIENCE)
        if seconds_left <= 0:
            self.cancellation.stop_waiting()
            raise deadline_error(self._link.name)
        return seconds_left

    def read_arrived(self) -> None:
        """Read all replies that have arrived, so that neither end waits for the other end to read.

        Also wait for abandoned replies: the executor may be unable to read before it has sent a large one.
        """
        for number in list(self.abandoned):
            self.receive_until(number)
            self.abandoned.discard(number)
            self._early_replies.pop(number, None)
        self._read_pending(self._awaits_reply)

    def await_offer_reply(self) -> None:
        """Wait at most `PATIENCE` seconds for the reply to an offer of an upload. Another thread may read the reply."""
        interrupt_mask.check()
        with collect_later, self._link.read_lock:
            if self.offers.open or self.offers.unanswered_queries:
                self._receive_one(PATIENCE)

    def poll(self) -> None:
        """Read messages that have arrived, unless another thread is reading. Reconnect a broken connection.

        Raises:
            SessionLost: the executor is gone.
        """
        self._read_pending(lambda: True)

    def _read_pending(self, awaited: Callable[[], bool]) -> None:
        """Read messages that have arrived, while `awaited` returns True. Do nothing if another thread is reading."""
        if awaited() and self._link.read_lock.acquire(blocking=False):
            try:
                self._drop_discarded()
                while awaited() and self._receive_one(0.0):
                    pass
            finally:
                self._link.read_lock.release()

    def _awaits_reply(self) -> bool:
        """Return True if the executor has not answered a submission, an offer or a query."""
        return bool(self.pending or self.offers.open or self.offers.unanswered_queries)

    def _drop_discarded(self) -> None:
        for number in self.deferred.take_discarded():
            if number in self.pending:
                self._dropped.add(number)
            else:
                self._early_replies.pop(number, None)

    def _receive_one(self, timeout: float) -> bool:
        """Read a frame. Return True if a frame arrived within `timeout` seconds."""
        link, offers = self._link, self.offers
        if link.lost:
            link.check()
        if offers.unsent:
            offers.send_wanted()  # uploads that an interrupt has left; the executor does not reply before it has them
        try:
            frame = link.receive(timeout)
            message = decode(frame.head)
            if type(message) is Completed:
                self._complete(message, frame.body)
            else:
                self._handle_message(message, frame.body)
        except TimeoutError:
            if timeout:
                self.while_waiting()
            return False
        except (TransportError, ProtocolError) as error:
            link.lose(error)
        if offers.unsent:
            offers.send_wanted()
        return True

    def _handle_message(self, message: Message, body: Sequence[Buffer]) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            self._link.lose(ProtocolError(f"the executor sent an unexpected {type(message).__name__}"))
        handler(message, body)

    def _closed(self, message: ProtocolClose, _: Sequence[Buffer]) -> None:
        self._link.lose(ProtocolError(message.reason))

    def _complete(self, completed: Completed, body: Sequence[Buffer]) -> None:
        number = completed.sequence
        pending = self.pending.get(number)
        if pending is None:
            raise ProtocolError(f"the executor answered submission {number}, which is not pending")
        timing, cancellation = completed.timing, self.cancellation
        self.deferred.read = pending.end_offset
        if completed.links:
            self.on_link_measurements(completed.links)
        if completed.room is not None:
            self.on_headroom(completed.room)
        for notify in taps.answered:
            notify(self.reader.number, number, completed, sum(map(len, body)))
        self._stats.spent(timing)
        if pending.prepared is not None and pending.prepared.note_seconds is not None:
            pending.prepared.note_seconds(timing.execute)
        seconds = timing.queue + timing.decode + timing.execute + timing.encode
        self._executor_seconds += seconds
        if completed.failures:
            self.reader.note_failures(completed, pending, unobserved=number in cancellation.unobserved)
        if cancellation.unobserved:
            cancellation.unobserved.discard(number)
        if pending.claimed_instructions and pending.prepared is not None:
            confirm_claims(pending.prepared, pending.program, pending.claimed_instructions, completed)
        if number in self.abandoned or number in self._dropped:
            self.abandoned.discard(number)
            self._dropped.discard(number)
        elif pending.is_awaited:
            self._early_replies[number] = (completed, body, pending.synchronize, self._executor_seconds, seconds)
        if cancellation.cancelled:
            cancellation.cancelled.discard(number)
        del self.pending[number]


def _nothing() -> None:
    """Do nothing: the default of `while_waiting` and `send_wanted`."""


def _ignored(_: Sequence[LinkMeasurement] | Room) -> None:
    """Do nothing: the default of `on_link_measurements` and `on_headroom`, which only several executors need."""
