"""Submissions of one session: plan, number and send programs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import get_ident
from typing import Final

import msgspec
import numpy as np

from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tap import taps
from djinn_client.runtime.executor_link import ExecutorLink
from djinn_client.runtime.observing import Observers
from djinn_client.runtime.planning.derived_values import DerivedValues
from djinn_client.runtime.planning.planner import Planner
from djinn_client.runtime.receiving.replies import Replies
from djinn_client.runtime.sending.binding import Bindings, PendingSubmission, bind, open_claims
from djinn_client.runtime.sending.template import PreparedTemplate, dying_inputs
from djinn_client.runtime.sending.workload import workload_of
from djinn_client.runtime.stats import Stats
from djinn_client.sink import Submission
from djinn_core.errors import ProtocolError, UnsupportedOperation
from djinn_core.hookspecs.transports import Buffer, Frame
from djinn_core.ir.slot_arrays import Words
from djinn_core.system.interrupts import interrupt_mask
from djinn_core.system.printable import printable
from djinn_core.wire import limits
from djinn_core.wire.binding_delta import Handles, InputChanges, SlotChanges, pack_handles
from djinn_core.wire.messages import Claim, InitialBindings, Submit, Template, TemplateReply, TemplateRequest, encode
from djinn_core.wire.numeric_messages import NumericSettings
from djinn_core.wire.templates import TemplateCache


class KnownTemplates:
    """The templates that one executor has cached. Client and executor evict templates in the same order.

    Attributes:
        bindings: the last bindings of each template, by its digest.
    """

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self.bindings: TemplateCache[Bindings] = TemplateCache()

    def forget(self, prepared: PreparedTemplate) -> None:
        """Forget a template, so that its next run sends it again."""
        self.bindings.drop(prepared.digest)

    def put(self, prepared: PreparedTemplate, bindings: Bindings) -> None:
        """Note that the executor lacked this template and now gets it with these bindings."""
        self.bindings.put(prepared.digest, bindings, len(prepared.template.code))
        self._stats.templates_sent += 1


# Errors of the encoder: numbers of more than 64 bits, invalid texts, nesting too deep, data too large.
UNSENDABLE: Final = (ProtocolError, UnsupportedOperation, OverflowError, ValueError, TypeError, RecursionError)
NO_VALUES: Final[Words] = np.empty(0, np.int64)
_BESIDE_BYTES: Final = 1024  # bytes that connections put before a message


def framed(message: Submit) -> Frame:
    """Return the message as a frame.

    Raises:
        UnsupportedOperation: the message exceeds an executor's limit.
        OverflowError, ValueError, TypeError, RecursionError: the message cannot be encoded.
    """
    frame = Frame(encode(message))
    if len(frame.head) > limits.HEAD_BYTES - _BESIDE_BYTES:
        raise UnsupportedOperation(
            f"the message of a program has {len(frame.head):,} bytes, but the executor accepts at most "
            f"{limits.HEAD_BYTES:,}. Call the op several times with shorter lists"
        )
    return frame


def refused_submit(submit: Submit, submission: Submission, reason: str) -> Submit:
    """Return `submit` without a template to run. The executor marks the results of its program as failed with `reason`."""
    program = submission.program
    results: list[int] = []
    targets: dict[int, None] = {}
    for instruction in program.instructions():
        results += instruction.outputs
        targets.update(dict.fromkeys(instruction.writes))
    return msgspec.structs.replace(
        submit,
        outputs=pack_handles([handle for handle in results if handle not in program.dead]),
        free=pack_handles([*submission.free, *dying_inputs(program)]),
        first=InitialBindings((), (), pack_handles(targets)),
        refused=printable(reason) or "the program cannot be encoded as a message",
    )


WINDOW: Final = 64  # limit of pending submissions before the program waits for the oldest
UNREAD: Final = 8  # limit of small replies that are read together if no thread waits


class Submissions:
    """Send programs to one executor. The caller holds the sink's lock.

    Attributes:
        planner: prepares templates.
        last_number: number of the last submission.
    """

    def __init__(
        self,
        link: ExecutorLink,
        replies: Replies,
        planner: Planner,
        stats: Stats,
        observers: Observers,
    ) -> None:
        self.planner = planner
        self.last_number = 0
        self._link = link
        self._replies = replies
        self._stats = stats
        self._observers = observers
        self._numeric_settings = NumericSettings()  # the last settings sent to the executor
        self._derived = DerivedValues(self.submit)
        self._templates = KnownTemplates(stats)
        replies.handle(TemplateRequest, self._send_template)

    def submit(self, submission: Submission) -> int:
        """Send a submission without waiting for the reply.

        Raises:
            SessionLost: the executor is gone.
        """
        thread = get_ident()
        if thread == interrupt_mask.main and not interrupt_mask.depth:
            with interrupt_mask:
                return self.submit(submission)
        self.make_ready()
        program = submission.program
        derived = self._derived
        has_ops = len(program) > 0
        if not has_ops and not derived.has_values:
            return self.run(submission)
        try:
            prepared, values = self.planner.prepare(program) if has_ops else (None, NO_VALUES)
        except Exception as error:
            self.run(Submission(program, submission.free), refused=str(error) or type(error).__name__)
            raise
        if prepared is not None and prepared.rewrite is not None:
            values = derived.extend(prepared, values)
        if derived.has_values:
            return self._run_derived(submission, prepared, values)
        if thread != interrupt_mask.main:
            return self._run(submission, prepared, values, thread=thread)
        # equivalent to `with interrupt_mask.uninterruptible`, but cheaper inside a mask
        section = interrupt_mask.uninterruptible
        section.depth += 1
        interrupt_mask.depth += 1
        try:
            return self._run(submission, prepared, values, thread=thread)
        finally:
            section.depth -= 1
            interrupt_mask.depth -= 1

    def _run_derived(self, submission: Submission, prepared: PreparedTemplate | None, values: Words) -> int:
        """Invalidate the derived values that a submission makes stale, and send it. It also frees them."""
        derived = self._derived
        with interrupt_mask.uninterruptible:
            handles = [values[i] for i in prepared.written] if prepared is not None else ()
            derived.invalidate([*submission.free, *submission.program.dead, *handles])
            free = (*submission.free, *derived.take_stale())
            return self._run(msgspec.structs.replace(submission, free=free), prepared, values)

    def _send_settings(self) -> None:
        settings = port.numeric_settings
        if settings != self._numeric_settings:
            self._replies.send(settings)
        self._numeric_settings = settings

    def take_derived(self) -> tuple[int, ...]:
        """Forget all derived values, and return them to be freed. The caller guarantees that no program uses them."""
        return self._derived.take_all()

    def make_ready(self, unread: int = UNREAD) -> None:
        """Wait until a submission can be sent at once.

        `unread`: number of pending submissions at which arrived replies are read first. Use a smaller number than `UNREAD`
        if replies affect the next plan.

        Raises:
            SessionLost: the executor is gone.
            KeyboardInterrupt: the program was interrupted. Nothing was sent.
        """
        if self._link.lost:
            self._link.check()
        if interrupt_mask.caught is not None:
            interrupt_mask.check()
        replies = self._replies
        deferred, offers = replies.deferred, replies.offers
        try:
            # Messages may have arrived that must be read before the next send.
            must_read = (
                replies.abandoned or deferred.large or deferred.discarded or offers.open or offers.unanswered_queries
            )
            if must_read or len(replies.pending) >= unread:
                self._read_replies()
            with self._link.write_lock:  # `send` waits for the lock as well, but without checking for an interrupt
                pass
        except KeyboardInterrupt:
            replies.cancellation.stop_after_interrupt()
            raise

    def _read_replies(self) -> None:
        """Read arrived replies. Wait until fewer than `WINDOW` submissions are pending."""
        replies = self._replies
        replies.make_room(0)
        replies.read_arrived()
        while len(replies.pending) >= WINDOW:
            replies.await_reply(next(iter(replies.pending)))

    def run(
        self,
        submission: Submission,
        prepared: PreparedTemplate | None = None,
        values: Sequence[int] | Words = NO_VALUES,
        refused: str = "",
    ) -> int:
        """Send a submission in which the executor runs `prepared`. Return its number. Call `make_ready` before.

        Args:
            submission: the program and the requests.
            prepared: the template to run, or None to run nothing.
            values: handles of the program's values, in order of first use.
            refused: the reason why the program does not run, or an empty text. Its results and written values become
                poison.

        Raises:
            SessionLost: the executor is gone.
        """
        handles = np.asarray(values, np.int64)
        if len(self._replies.pending) >= UNREAD:
            self.make_ready()
        if interrupt_mask.uninterruptible.depth:
            return self._run(submission, prepared, handles, refused)
        with interrupt_mask.uninterruptible:
            return self._run(submission, prepared, handles, refused)

    def _run(
        self,
        submission: Submission,
        prepared: PreparedTemplate | None,
        values: Words,
        refused: str = "",
        thread: int = 0,
    ) -> int:
        """Send a submission, as `run` does. `thread`: identity of the calling thread, if the caller knows it."""
        if port.numeric_settings is not self._numeric_settings:
            self._send_settings()
        observe = taps.sent
        begun = time.perf_counter() if observe else 0.0
        program = submission.program
        number = self.last_number + 1
        bindings: Bindings | None = None
        frame: Frame | None = None
        claimed_instructions: tuple[int, ...] = ()
        if prepared is not None:
            try:
                bindings = bind(prepared, program, values)
                message = self._message(number, submission, prepared, bindings)
                frame = framed(message)
            except UNSENDABLE as error:
                self._templates.forget(prepared)
                refused = str(error) or type(error).__name__
                prepared = bindings = None
        if frame is None:
            message = self._message(number, submission)
            if refused:
                message = refused_submit(message, submission, refused)
            frame = framed(message)
        size = len(frame.head)
        if prepared is not None and prepared.hints is not None and (message.template or not prepared.hints_sent):
            # Sent before the template that they describe, or after it if the template ran as recorded before it was
            # planned.
            self._link.send_message(prepared.hints)
            prepared.hints_sent = True
        if message.claims:
            claimed_instructions = tuple(dict.fromkeys(c.instruction for c in message.claims))
        expects_reply = bool(submission.fetch or submission.describe or submission.synchronize)
        replies = self._replies
        if replies.deferred.large:
            replies.make_room(size)
        self.last_number = number
        pending = PendingSubmission(
            program,
            prepared,
            bindings,
            claimed_instructions,
            expects_reply,
            submission.synchronize,
            self._link.channel.bytes_sent + size,
            thread or get_ident(),
        )
        replies.expect(number, pending)
        self._stats.submissions += 1
        self._stats.instructions_sent += len(prepared.nodes) if prepared is not None else 0
        sending = time.perf_counter() if observe else 0.0
        self._link.send(frame)
        for notify in observe:
            notify(replies.reader.number, number, pending, begun, sending, size)
        return number

    def _message(
        self,
        number: int,
        submission: Submission,
        prepared: PreparedTemplate | None = None,
        bindings: Bindings | None = None,
    ) -> Submit:
        """Return the message of a submission. If `prepared` is given, the message runs it."""
        digest = b""
        outputs: Handles = ()
        slot_changes: SlotChanges = ()
        input_changes: InputChanges = ()
        claims: tuple[Claim, ...] = ()
        first: InitialBindings | None = None
        template: Template | None = None
        free = submission.free
        if prepared is not None and bindings is not None:
            digest = prepared.digest
            if prepared.outputs.size:
                outputs = pack_handles(bindings.values[prepared.outputs].tolist())
            if (before := self._templates.bindings.replace(digest, bindings)) is None:
                self._templates.put(prepared, bindings)
                first, template = bindings.initial(workload_of(submission.program)), prepared.template
            else:
                self._stats.templates_reused += 1
                slot_changes, input_changes = bindings.slot_changes(before), bindings.input_changes(before)
            if prepared.claims:
                claims = open_claims(prepared, submission.program)
            if prepared.unused:
                free = (*free, *[int(bindings.values[i]) for i in prepared.unused])
        observers = self._observers
        return Submit(
            number,
            fetch=pack_handles(submission.fetch) if submission.fetch else (),
            free=pack_handles(free) if free else (),
            digest=digest,
            outputs=outputs,
            slot_changes=slot_changes,
            input_changes=input_changes,
            first=first,
            template=template,
            describe=pack_handles(submission.describe) if submission.describe else (),
            claims=claims,
            synchronize=submission.synchronize,
            trace=observers.trace_context("submission", self._replies.reader.number, number)
            if observers.tracing
            else "",
        )

    def _send_template(self, request: TemplateRequest, _: Sequence[Buffer]) -> None:
        pending = self._replies.pending.get(request.sequence)
        if pending is None or pending.prepared is None or pending.bindings is None:
            raise ProtocolError(f"the executor requested the template of submission {request.sequence}, which has none")
        self._link.send(
            Frame(
                encode(TemplateReply(pending.prepared.template, pending.bindings.initial(workload_of(pending.program))))
            )
        )
