"""The client's end of a session: numbered submissions out, answers in."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import attrs
import torch

from djinn_core.errors import DjinnError, ProtocolError, SessionLost, TransportError
from djinn_core.hookspecs.transports import Buffer, Frame
from djinn_core.interception.recording.gc_pause import collect_later
from djinn_core.interception.runtime_interface import Answer, Submission
from djinn_core.interrupts import LOOK_SECONDS, held
from djinn_core.logs import get_logger
from djinn_core.runtime.connecting.client_channel import ClientChannel
from djinn_core.runtime.connecting.close_reason import LAST_WORDS_SECONDS, last_words
from djinn_core.runtime.deadlines import cancelled, due, exceeded
from djinn_core.runtime.observing import Observers
from djinn_core.runtime.planning.derived_values import DerivedValues
from djinn_core.runtime.planning.planner import Planner
from djinn_core.runtime.receiving.answers import AnswerReader
from djinn_core.runtime.receiving.deferred_responses import DeferredResponses, RoundTrips
from djinn_core.runtime.receiving.failures import Failures
from djinn_core.runtime.receiving.relayed_transfers import Passing
from djinn_core.runtime.sending.binding import bind, settle_claims
from djinn_core.runtime.sending.compressing import Compressing
from djinn_core.runtime.sending.known_templates import KnownTemplates
from djinn_core.runtime.sending.pending import Pending, seconds_of
from djinn_core.runtime.sending.template import Prepared
from djinn_core.runtime.sending.unsendable_programs import UNSENDABLE, framed, refusing
from djinn_core.runtime.sending.uploads import Uploads
from djinn_core.runtime.stats import Stats
from djinn_core.wire.bindings import pack_handles
from djinn_core.wire.message import Message
from djinn_core.wire.messages import (
    AnyMessage,
    Completed,
    Define,
    DeviceStats,
    Goodbye,
    NeedTemplate,
    ProtocolClose,
    Query,
    Submit,
    decode,
    encode,
)
from djinn_core.wire.peer_messages import Invited, Met, SendValues, TransferChunk, TransferHeader
from djinn_core.wire.stop_messages import STOPS_LIMIT, Stop
from djinn_core.wire.upload_messages import BlobHit, BlobNeeded, BlobQueryReply, Withdraw

log = get_logger("djinn.session")
R = TypeVar("R", DeviceStats, Invited, Met)

WINDOW = 64  # submissions that may be unanswered before the program waits for the oldest
UNREAD = 8  # answers that may wait to be read together: small ones, where no thread waits
PATIENCE = (
    LOOK_SECONDS  # seconds of waiting after which locks are let go, and interrupts and other threads have a chance
)
GRACE_SECONDS = (
    0.2  # for what is nearly done, before executors are told what an interrupted wait does not want any more
)


class Session:
    """Implements `interception.port.Runtime` over one connection.

    Sending is serialised by the recorder's lock; whichever thread waits for an answer reads the connection.
    """

    def __init__(
        self,
        connection: ClientChannel,
        planner: Planner,
        stats: Stats,
        server: str,
        observers: Observers,
        recalls: bool = False,
        codings: Sequence[str] = (),
        number: int = 0,
        failures: Failures | None = None,
        called: str = "",
    ) -> None:
        """`recalls`, `codings`: as in `Attached`. `number`: of the executor in its pool, whose `failures` are shared.

        `server`: the address that was reached. `called`: what messages call it, the address that is configured.
        """
        self.connection = connection
        self.server = server
        self.called = called or server
        self._planner = planner
        self._stats = stats
        self._observers = observers
        self._sequence = 0
        self._pending: OrderedDict[int, Pending] = OrderedDict()
        self._answers: dict[int, tuple[Completed, Sequence[Buffer], bool, float]] = {}
        self._abandoned: set[int] = set()
        self._dropped: set[int] = set()
        self._late = DeferredResponses()
        self._link = RoundTrips()
        self._excused: set[int] = set()
        self._spent = 0.0  # seconds of the executor's
        self._number = number
        self._failures = failures if failures is not None else Failures()
        if number:
            self._failures.read_by(number, self._receive_until)
        self._derived = DerivedValues(self.submit)
        self._known = KnownTemplates(stats)
        self._read = AnswerReader(self._failures, number)
        self._receiving = threading.RLock()
        self._uploads = Uploads(self, stats, observers, recalls, Compressing(codings))
        self._replies: list[DeviceStats | Invited | Met] = []
        self._unheard = 0  # replies still to come whose question was interrupted
        self._writing = (
            threading.RLock()
        )  # around what is sent as one, so that other threads wait for it where they can be interrupted
        self._cancelled: set[int] = set()
        self.passing = Passing()
        self.lost: str = ""

    def plan_by(self, planner: Planner) -> None:
        """Switch to another planner, without the plans of the one before. The caller holds the recorders' lock."""
        self._planner = planner

    # --- out ---------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> int:
        """Send a submission without waiting for it; returns its number. The caller holds the recorders' lock.

        Raises:
            SessionLost: the executor is gone.
        """
        with held:
            self.make_ready()
            program = submission.program
            if not program.calls and not self._derived:
                return self.run(submission)
            try:
                prepared, values = self._planner.prepare(program) if program.calls else (None, [])
            except Exception as error:
                self.run(Submission(program, submission.free), refused=str(error))
                raise
            if prepared is not None:
                values = self._derived.extend(prepared, values)
            with held.whole():
                if self._derived:
                    written = [values[i] for i in prepared.written] if prepared is not None else ()
                    self._derived.touched([*submission.free, *program.dead, *written])
                    submission = attrs.evolve(submission, free=(*submission.free, *self._derived.take_stale()))
                return self.run(submission, prepared, values)

    def make_ready(self) -> None:
        """Wait until a submission can be sent at once.

        Raises:
            SessionLost: the executor is gone.
            KeyboardInterrupt: there was an interrupt.
        """
        self._check()
        held.check()
        try:
            self._await_room()
        except KeyboardInterrupt:
            self.interrupted()
            raise

    def _await_room(self) -> None:
        self._make_room(0)
        # What one of several executors says of its links counts for the next plan.
        unread = UNREAD if not self._number else 1
        if len(self._pending) >= unread or self._abandoned or self._uploads.unanswered or self._late.unsettled:
            self.take_what_came()
        while len(self._pending) >= WINDOW:
            self._stats.round_trips += 1
            self._receive_until(next(iter(self._pending)))
        with held.patiently(self._writing):  # another thread may be sending for as long as the executor does not read
            return

    def run(
        self,
        submission: Submission,
        prepared: Prepared | None = None,
        values: Sequence[int] = (),
        refused: str = "",
    ) -> int:
        """Send a submission of which the executor runs what is `prepared`, over `values` of its program.

        Where it is `refused`, for that reason, what the program would have made or written is poison.

        Raises:
            SessionLost: the executor is gone.
        """
        self.make_ready()
        with held.whole():
            return self._run(submission, prepared, values, refused)

    def _run(self, submission: Submission, prepared: Prepared | None, values: Sequence[int], refused: str) -> int:
        program = submission.program
        sequence = self._sequence + 1
        bound = bind(prepared, program, values) if prepared is not None else None
        message = Submit(
            sequence,
            fetch=pack_handles(submission.fetch),
            free=pack_handles(submission.free),
            describe=pack_handles(submission.describe),
            synchronize=submission.synchronize,
        )
        frame: Frame | None = None
        if prepared is not None and bound is not None:
            plain = message
            try:
                message = self._known.run_message(plain, prepared, bound, values, program)
                frame = framed(message)
            except UNSENDABLE as error:
                self._known.forget(prepared)
                message = refusing(plain, program, str(error))
                prepared = bound = None
        elif refused:
            message = refusing(message, program, refused)
        frame = frame or framed(message)
        claimed = tuple(dict.fromkeys(c.instruction for c in message.claims))
        answered = bool(submission.fetch or submission.describe or submission.synchronize)
        position = self._make_room(len(frame.head))
        if not self._pending:
            self._link.sent_alone(sequence)
        self._sequence = sequence
        self._pending[sequence] = Pending(program, prepared, bound, claimed, answered, submission.synchronize, position)
        self._stats.submissions += 1
        self._stats.instructions_sent += len(prepared.nodes) if prepared is not None else 0
        self.send(frame)
        self._observers.tell("submitted", submission=sequence, instructions=len(program))
        return sequence

    def upload(self, handle: int, source: torch.Tensor, device: int = 0) -> None:  # noqa: ARG002 - there is one
        """Send a CPU tensor; its memory is the caller's again when this returns.

        Raises:
            SessionLost: the executor is gone.
        """
        with held:
            try:
                self._make_room(source.nbytes)
            except KeyboardInterrupt:
                self.send(Frame(encode(Withdraw(handle))))
                raise
            try:
                self._uploads.upload(handle, source)
            finally:
                self.connection.own()

    def expect_uploads(self, tensors: Sequence[torch.Tensor]) -> None:
        """As `Runtime.expect_uploads`."""
        if tensors:
            self._observers.tell("uploading", bytes=sum(t.nbytes for t in tensors))
        with held:
            self._uploads.expect(tensors)

    def _make_room(self, nbytes: int) -> int:
        """Take in late answers where the executor might be busy with them, and not read `nbytes` more; where those end."""
        position = self.connection.bytes_sent + nbytes
        while (number := self._late.blocked_by(position, self._pending)) is not None:
            self._stats.round_trips += 1
            self._receive_until(number)
        return position

    def send(self, frame: Frame) -> None:
        """Send a frame; raises `SessionLost` where the executor is gone. An interrupt waits until it is on its way."""
        self._check()
        try:
            with held.whole(), self._writing:
                self.connection.send(frame)
        except TransportError as error:
            self._lose_with_reason(error)

    def _lose_with_reason(self, error: TransportError) -> None:
        """After a failed send. The executor may have said why it hung up; another thread may just be reading that."""
        found = self._receiving.acquire(timeout=LAST_WORDS_SECONDS)
        try:
            self._check()
            reason = last_words(self.connection) if found else ""
        finally:
            if found:
                self._receiving.release()
        self._lose(ProtocolError(reason) if reason else error)

    # --- in ----------------------------------------------------------------------------------------------------

    def wait(self, number: int) -> Answer:
        """Wait for what submission `number` asked for.

        Raises:
            RemoteError: a value that it asked for could not be computed, or, where it synchronised, any op failed.
            SessionLost: the executor is gone.
            DeadlineExceeded: as `deadline` says.
        """
        with held:
            return self._wait(number)

    def _wait(self, number: int) -> Answer:
        late, there = number in self._late, number not in self._pending
        self._stats.round_trips += not (late and there)
        try:
            self._receive_until(number, due(), wanted=True)
        except BaseException:
            if not late:  # a late one may be waited for again
                self._abandoned.add(number)
            raise
        completed, body, synchronize, spent = self._answers.pop(number)
        self._late.taken(number)
        if not there:
            self._link.came(number, seconds_of(completed))
        tensors, described = self._read.tensors(completed, body), self._read.described(completed)
        unseen = self._failures.take_unseen() if synchronize else self._failures.take_check((self._number, number))
        if unseen is not None:
            raise unseen
        return Answer(tensors, described, spent)

    def defer(self, number: int, nbytes: int) -> None:
        """As `Runtime.defer`."""
        self._late.defer(number, nbytes)

    def discard(self, number: int) -> None:
        """As `Runtime.discard`."""
        self._late.discard(number)

    def mark_unobserved(self, number: int) -> None:
        """As `Runtime.mark_unobserved`."""
        thread = threading.get_ident()
        with held, collect_later, held.patiently(self._receiving):
            self._excused.update([n for n, p in self._pending.items() if n > number and p.thread == thread])
            self._failures.mark_unobserved((self._number, number))

    def has_come(self, number: int) -> bool:
        """As `Runtime.has_come`."""
        if number in self._pending and not self.lost:
            try:
                with held, collect_later:
                    self._take_in_while(lambda: number in self._pending)
            except SessionLost:
                return True  # `wait` says why
        return number not in self._pending or bool(self.lost)

    @property
    def round_trip_seconds(self) -> float | None:
        """As `Runtime.round_trip_seconds`."""
        return self._link.seconds

    def _receive_until(self, number: int, until: float | None = None, wanted: bool = False) -> None:
        """Take in what comes until submission `number` is answered. `wanted`: the program waits for the answer itself.

        Raises:
            DeadlineExceeded: that was not before `until`.
            ProgramStopped: `djinn.cancel` was called, and it is wanted.
            KeyboardInterrupt: there was an interrupt. Inside `whole`, it ends the wait by stopping what this thread has sent.
        """
        stopped = False
        while number in self._pending:
            held.check()
            if held.pending and not stopped:
                self.stop_waiting()
                stopped = True
            if wanted and number in self._cancelled:
                raise cancelled(self.server)
            left = PATIENCE if until is None else min(until - time.monotonic(), PATIENCE)
            if left <= 0:
                self.stop_waiting()
                raise exceeded(self.called)
            if self._receiving.acquire(timeout=left):
                try:
                    with collect_later:
                        if number in self._pending:
                            self._receive_one(left)
                finally:
                    self._receiving.release()

    def interrupted(self) -> None:
        """As `Runtime.interrupted`."""
        self.stop_waiting(GRACE_SECONDS)

    def stop_waiting(self, grace: float = 0.0) -> None:
        """Cancel this thread's unanswered submissions; executors are told after `grace` seconds."""
        thread = threading.get_ident()
        self._stop_those([n for n, p in list(self._pending.items()) if p.thread == thread], grace)

    def cancel(self, thread: int | None = None) -> None:
        """Stop what a thread has sent and not got an answer to, or all threads have; their waits for it end."""
        numbers = [n for n, p in list(self._pending.items()) if thread is None or p.thread == thread]
        self._cancelled.update(numbers)
        self._stop_those(numbers)

    def _stop_those(self, numbers: Sequence[int], grace: float = 0.0) -> None:
        if numbers and not self.lost:
            self._excused.update(numbers)
            # Not here: another thread may be sending for as long as the executor does not read.
            stop = tuple(numbers)[-STOPS_LIMIT:]
            threading.Thread(target=self._stop, args=(stop, grace), name="djinn-stop", daemon=True).start()

    def _stop(self, numbers: tuple[int, ...], grace: float) -> None:
        if grace:
            time.sleep(grace)
            numbers = tuple([n for n in numbers if n in self._pending])
        try:
            if numbers:
                self.connection.send(Frame(encode(Stop(numbers))))
        except TransportError as error:
            log.debug("the executor was not told what to stop", reason=str(error))

    def take_what_came(self) -> None:
        """Take in the answers that are there, so that neither end waits for the other to read.

        An answer that a caller asked for but did not wait for may be large, so it is awaited.
        """
        for number in list(self._abandoned):
            self._receive_until(number)
            self._abandoned.discard(number)
            self._answers.pop(number, None)
        self._take_in_while(self._awaits)

    def _take_in_while(self, awaited: Callable[[], bool]) -> None:
        """Take in what is there, as long as something is awaited; unless another thread does."""
        if awaited() and self._receiving.acquire(blocking=False):
            try:
                self._drop_forgotten()
                while awaited() and self._receive_one(0.0):
                    pass
            finally:
                self._receiving.release()

    def _drop_forgotten(self) -> None:
        for number in self._late.take_forgotten():
            if number in self._pending:
                self._dropped.add(number)
            else:
                self._answers.pop(number, None)

    def take_next(self) -> None:
        """Wait for an answer to an offer, for a while; another thread may take it in."""
        held.check()
        with collect_later, self._receiving:
            if self._uploads.unanswered:
                self._receive_one(PATIENCE)

    def _awaits(self) -> bool:
        """True if a reply of the executor is due."""
        return bool(self._pending or self._uploads.unanswered)

    def _receive_one(self, timeout: float) -> bool:
        """Take in one frame; whether one came within `timeout` seconds."""
        self._check()
        self._uploads.send_wanted()  # what an interrupt has left: the executor says nothing before it has that
        try:
            frame = self.connection.receive(timeout)
            self._take(decode(frame.head), frame.body)
        except TimeoutError:
            return False
        except (TransportError, ProtocolError) as error:
            self._lose(error)
        self._uploads.send_wanted()
        return True

    def _take(self, message: AnyMessage, body: Sequence[Buffer]) -> None:
        if isinstance(message, Completed):
            self._complete(message, body)
        elif isinstance(message, NeedTemplate):
            self._define(message)
        elif isinstance(message, BlobNeeded | BlobHit | BlobQueryReply):
            self._uploads.answered(message)
        elif isinstance(message, DeviceStats | Invited | Met):
            if self._unheard:
                self._unheard -= 1
            else:
                self._replies.append(message)
        elif isinstance(message, TransferHeader | TransferChunk):
            self.passing.take(message, body)
        elif isinstance(message, ProtocolClose):
            self._lose(ProtocolError(message.reason))
        else:
            self._lose(ProtocolError(f"unexpected {type(message).__name__}"))

    def _define(self, needed: NeedTemplate) -> None:
        pending = self._pending.get(needed.sequence)
        if pending is None or pending.prepared is None or pending.bound is None:
            raise ProtocolError(f"the executor asks for the template of submission {needed.sequence}, which has none")
        self.send(Frame(encode(Define(pending.prepared.template, pending.bound.as_first()))))

    def _complete(self, completed: Completed, body: Sequence[Buffer]) -> None:
        pending = self._pending.get(completed.sequence)
        if pending is None:
            raise ProtocolError(f"the executor answers submission {completed.sequence}, which does not wait")
        timing = completed.timing
        self._late.has_read(pending.position)
        self.passing.seen.extend(completed.seen)
        self._observers.tell("completed", submission=completed.sequence, execute=timing.execute, queue=timing.queue)
        pending.spent(timing, self._stats)
        self._spent += seconds_of(completed)
        if completed.failures:
            self._read.failed(completed, pending, excused=completed.sequence in self._excused)
        self._excused.discard(completed.sequence)
        if pending.claimed and pending.prepared is not None:
            settle_claims(pending.prepared, pending.program, pending.claimed, completed)
        if completed.sequence in self._abandoned or completed.sequence in self._dropped:
            self._abandoned.discard(completed.sequence)
            self._dropped.discard(completed.sequence)
        elif pending.answered:
            self._answers[completed.sequence] = (completed, body, pending.synchronize, self._spent)
        self._cancelled.discard(completed.sequence)
        del self._pending[completed.sequence]

    # --- life --------------------------------------------------------------------------------------------------

    def figures(self, *, reset_peak: bool = False, device: int = 0) -> dict[str, int]:  # noqa: ARG002 - there is one
        """The executor's counts and bytes for this session; one round trip. The caller holds the recorders' lock.

        The executor starts to count the peak anew where `reset_peak` says so.

        Raises:
            SessionLost: the executor is gone.
        """
        return dict(self.ask(Query(reset_peak), DeviceStats).values)

    def ask(self, question: Message, kind: type[R]) -> R:
        """The executor's reply to a question of its own kind; one round trip. The caller holds the recorders' lock.

        Raises:
            SessionLost: the executor is gone.
        """
        self._stats.round_trips += 1
        with held, collect_later, held.patiently(self._receiving):
            self.tell(question)
            try:
                while not self._replies:
                    held.check()
                    self._receive_one(PATIENCE)
            except KeyboardInterrupt:
                self._unheard += 1
                raise
            reply = self._replies.pop()
        if not isinstance(reply, kind):
            self._lose(ProtocolError(f"{type(reply).__name__} answers {type(question).__name__}"))
        return reply

    def take_over(self, ship: SendValues) -> list[Frame]:
        """A shipment, as frames for another executor; waits for it. The caller holds the recorders' lock.

        Raises:
            SessionLost: the executor is gone.
        """
        self._stats.round_trips += 1
        with held.whole(), collect_later, self._receiving:
            self.tell(ship)
            while not self.passing.complete:
                self._receive_one(PATIENCE)
            return self.passing.hand_over()

    def tell(self, message: Message) -> None:
        """Send a message between submissions. The caller holds the recorders' lock.

        Raises:
            SessionLost: the executor is gone.
        """
        frame = Frame(encode(message))
        self._make_room(len(frame.head))
        self.send(frame)

    @property
    def last_number(self) -> int:
        """The number of the last submission."""
        return self._sequence

    def abandon(self, number: int) -> None:
        """Give up waiting for the answer to submission `number`."""
        self._abandoned.add(number)

    def _check(self) -> None:
        if self.lost:
            raise SessionLost(self.lost)

    def _lose(self, error: Exception) -> NoReturn:
        reason = str(error)
        if self.server != self.called:  # the user knows the executor's own address from nowhere
            reason = reason.replace(f"server {self.server}", "its executor").replace(
                self.server, "its executor's address"
            )
        log.debug("the session is lost", server=self.server, reason=str(error))
        self.lost = (
            f"the session with {self.called} is lost: {reason}. Its tensors are gone; "
            "call djinn.init() to begin a new session, and make or load them again"
        )
        raise SessionLost(self.lost) from error

    def close(self) -> None:
        """End the session; the executor frees everything in it."""
        if not self.lost:
            self.connection.expire()
            try:
                self.send(Frame(encode(Goodbye())))
            except DjinnError as error:
                log.debug("no goodbye", reason=str(error))
            self.lost = f"the session with {self.called} was closed"
        self.connection.close()
