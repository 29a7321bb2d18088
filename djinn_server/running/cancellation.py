"""Cancel submissions between two ops: at the client's deadline, or after the session has ended.

A long submission also yields the device between two ops while another session waits.

A session that computes does not read its connection. If it has been busy with one message for `LOOK_SECONDS`, another
thread (`session_threads.py`) reads the connection and handles `CancelSubmissions`, `Goodbye` and a broken connection.
The thread reads at most `AHEAD_BYTES`, because a client may send faster than its programs run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.logs import get_logger
from djinn_core.wire import limits
from djinn_core.wire.cancel_messages import CancelSubmissions, RepeatOutcome
from djinn_core.wire.messages import Goodbye, decode, is_of_kind
from djinn_server.memory.room import is_shortage
from djinn_server.recovery.executor_channel import ExecutorChannel
from djinn_server.recovery.journal import Journal
from djinn_server.running.fair_share import Share
from djinn_server.running.run import RunOutcome
from djinn_server.running.run_request import CANCEL, YIELD, RunRequest
from djinn_server.usage_metrics import UsageMetrics

LOOK_SECONDS: Final = 0.25
_log = get_logger("djinn.server")

SHORTAGE: Final = "the op had no memory on the server that ran it first"


class ClientLeft(TransportError):  # noqa: N818 - says what happened
    """The client sent `Goodbye`: the session ends."""

    def __init__(self) -> None:
        super().__init__("the client has ended its session")


class CancellationState:
    """Cancelled submissions of a session. Any thread may cancel. Only the session begins and ends submissions.

    Attributes:
        busy_since: time at which the session began to handle the present message (`time.perf_counter`); 0.0 while idle.
        wakeup: ends a wait of the session.
        share: the session's share of the device.
        client_left: set by a `Goodbye` without `finish`.
        journal: log of cancellations. A replay stops submissions at the ops at which the earlier process stopped them.
        outcome_to_repeat: outcome of the next submission on another executor, which this executor must reproduce. None if
            the client has not sent one.
    """

    def __init__(self, share: Share, usage: UsageMetrics, wakeup: Callable[[], None] = lambda: None) -> None:
        """`usage`: counts cancelled submissions, requests and yields. `share` and `wakeup` are attributes."""
        self.wakeup = wakeup
        self._usage = usage
        self.share = share
        self._lock = threading.Lock()
        self._cancelled: set[int] = set()
        self._running: dict[int, RunRequest] = {}  # by submission
        self.busy_since = 0.0
        self.client_left = threading.Event()
        self._all_cancelled = False
        self.journal = Journal()
        self.outcome_to_repeat: RepeatOutcome | None = None

    @property
    def replaying(self) -> bool:
        """True while the session replays the journal of an earlier process."""
        return self.journal.replaying

    def stop_before(self, submission: int, op: int, reason: str) -> None:
        """Log that a device error stopped a submission before an op. Thread-safe.

        A recovery of the session stops the submission before the same op. `op`: number of the op. `reason`: message of the
        error.
        """
        self.journal.stopped(submission, op, reason)

    def begin(self, work: RunRequest) -> None:
        """Add a submission that begins to run. Halt it if it is already cancelled."""
        repeated, self.outcome_to_repeat = self.outcome_to_repeat, None
        if repeated is not None and repeated.submission == work.sequence:
            work.stop_at, work.earlier_shortages = repeated.stopped_at, dict.fromkeys(repeated.shortages, SHORTAGE)
        elif (past := self.journal.past) is not None:
            work.stop_at, work.stop_reason = past.stops.get(work.sequence, (None, ""))
            work.earlier_shortages = past.shortages.get(work.sequence, {})
        # No lock: `cancel` stores the number before it reads `_running`. Here the order is reversed, so one of both sees it.
        self._running[work.sequence] = work
        if self._all_cancelled or (self._cancelled and work.sequence in self._cancelled):
            with self._lock:
                work.halt.value |= CANCEL

    def end(self, work: RunRequest, run: RunOutcome) -> None:
        """Remove a submission that has run or was cancelled, and log its cancellation and its out-of-memory errors."""
        self._running.pop(work.sequence, None)
        if run.failures and self.journal.open:
            for failure in run.failures:
                if is_shortage(failure) and failure.instruction not in work.earlier_shortages:
                    self.journal.ran_out_of_memory(work.sequence, failure.instruction, failure.message)
        if self._cancelled:
            with self._lock:
                self._cancelled = {number for number in self._cancelled if number > work.sequence}
        if run.stopped_at is None:
            return
        self._usage.count("submissions_stopped")
        _log.info("a program was stopped", submission=work.sequence, op=run.stopped_at)
        if work.stop_at is None:
            self.journal.stopped(work.sequence, run.stopped_at)

    def stop(self, submissions: Iterable[int]) -> None:
        """Cancel submissions on request of the client, and count the request. `submissions`: sequence numbers."""
        self._usage.count("cancel_requests")
        self.cancel(submissions)

    def cancel(self, submissions: Iterable[int]) -> None:
        """Cancel submissions by their sequence numbers. Repeated calls do nothing."""
        with self._lock:
            self._cancelled.update(submissions)
            if len(self._cancelled) > limits.STOPS:
                self._cancelled = set(sorted(self._cancelled)[-limits.STOPS :])
            for work in self._running_submissions():
                if work.sequence in self._cancelled:
                    work.halt.value |= CANCEL
        self.wakeup()

    def _running_submissions(self) -> list[RunRequest]:
        return list(self._running.values())  # one atomic copy, because the session changes the dictionary concurrently

    def stop_all(self) -> bool:
        """Cancel all submissions, because the client is gone. Return False if an earlier call has done this."""
        with self._lock:
            first, self._all_cancelled = not self._all_cancelled, True
            for work in self._running_submissions() if first else ():
                work.halt.value |= CANCEL
        self.wakeup()
        return first

    def on_goodbye(self) -> None:
        """Cancel all submissions and end waits, because the client sent `Goodbye`."""
        self.client_left.set()
        self.stop_all()

    def pause(self, seconds: float) -> None:
        """Sleep for `seconds`. Raise an error if the client sends `Goodbye`.

        Raises:
            ClientLeft: the client sent `Goodbye` before the time was over.
        """
        if self.client_left.wait(seconds):
            raise ClientLeft

    def yield_device(self) -> None:
        """Yield the device before the next op, if the session has the device and another session waits."""
        with self._lock:
            for work in self._running_submissions() if self.share.turns.waiting else ():
                if work.on_halt is not None and not work.halt.value:
                    work.halt.value |= YIELD

    def handle_halt(self, work: RunRequest) -> bool:
        """Reset the halt flag and return True if it only asks to yield the device. Return False if it asks to cancel."""
        with self._lock:
            if work.halt.value & CANCEL:
                return False
            work.halt.value = 0
        self._usage.count("submission_yields")
        return True

    def is_busy(self) -> bool:
        """Return True if the session has handled one message for at least `LOOK_SECONDS`."""
        since = self.busy_since
        return since > 0.0 and time.perf_counter() - since >= LOOK_SECONDS


def poll_connection(cancellation: CancellationState, connection: ExecutorChannel) -> None:
    """Read frames that arrived while a session is busy, and handle those that cancel submissions or end the session.

    If the client is gone, cancel all submissions of the session.
    """
    broken: TransportError | None = None
    is_readable = True
    try:
        connection.read_ahead(limits.AHEAD_FRAMES, limits.AHEAD_BYTES)
    except ProtocolError as error:
        is_readable = False
        _log.debug("polling found an unreadable frame; the session will report it", error=str(error))
    except TransportError as error:
        broken = error
    # All queued frames: the session itself also queues frames while it sends.
    for frame in connection.queued():
        if not frame.body and handle_control(frame.head, cancellation, connection):
            return
    if connection.queued() or broken is not None or not is_readable:
        cancellation.wakeup()  # the session may have begun to wait, and a broken connection brings no more frames
    if broken is not None and connection.gone() and cancellation.stop_all():
        _log.warning("the programs of a session are cancelled: its client did not reconnect", reason=str(broken))


def handle_control(head: bytes, cancellation: CancellationState, connection: ExecutorChannel) -> bool:
    """Handle a `CancelSubmissions` or `Goodbye` and ignore other messages. Return True for a `Goodbye`."""
    if is_of_kind(head, CancelSubmissions) or is_of_kind(head, Goodbye):
        try:
            message = decode(head)
        except ProtocolError:
            return False  # the session decodes it again and reports the error
        if isinstance(message, CancelSubmissions):
            cancellation.cancel(message.submissions)
        elif isinstance(message, Goodbye):
            connection.on_goodbye()
            if not message.finish:
                cancellation.on_goodbye()
            return True
    return False
