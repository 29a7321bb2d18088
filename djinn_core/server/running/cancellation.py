"""Cancellation of submissions between two ops: at a deadline that the client set, or after the client has gone for good.

A long submission also yields the device there while another session waits.

A session that computes does not read its connection. So a monitor thread reads the connections of sessions that have computed
for a while, and looks for messages that cancel submissions and for the end of the connection. It reads only a little ahead:
otherwise a client that sends faster than its programs run would fill the memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Frame
from djinn_core.logs import get_logger
from djinn_core.server.recovery.executor_channel import ExecutorChannel
from djinn_core.server.recovery.journal import Journal, JournalReader
from djinn_core.server.running.fair_share import Share
from djinn_core.server.running.run import RunOutcome
from djinn_core.server.running.run_request import RunRequest
from djinn_core.server.usage_metrics import UsageMetrics
from djinn_core.wire import limits
from djinn_core.wire.cancel_messages import CancelSubmissions
from djinn_core.wire.messages import decode

LOOK_SECONDS: Final = 0.25
_log = get_logger("djinn.server")


class CancellationState:
    """The cancelled submissions of a session. The session begins and ends submissions, any thread may cancel them."""

    def __init__(self, turn: Share, usage: UsageMetrics) -> None:
        """`turn`: the session's share of the device. `usage`: counts the submissions that were stopped."""
        self._usage = usage
        self.turn = turn
        self._lock = threading.Lock()
        self._unwanted: set[int] = set()
        self._running: RunRequest | None = None
        self._since = 0.0
        self._nothing = False
        self._journal: Journal | None = None
        self._past: JournalReader | None = None

    def write_to(self, journal: Journal | None, past: JournalReader | None) -> None:
        """Set the journal for cancellations, and that of an earlier process, whose cancellations are repeated at the same ops."""
        self._journal, self._past = journal, past

    def begin(self, work: RunRequest, now: float) -> None:
        """Begin a submission, at `now` on the clock `time.perf_counter`."""
        if self._past is not None:
            work.stop_at = self._past.cuts.get(work.sequence)
        # Without the lock: `stop` notes what is cancelled before it looks at what runs, and this does it the other way round.
        self._since, self._running = now, work
        if self._nothing or (self._unwanted and work.sequence in self._unwanted):
            work.halt.append(True)

    def end(self, work: RunRequest, run: RunOutcome) -> None:
        """End a submission, which has run or was cancelled."""
        self._running = None
        if self._unwanted:
            with self._lock:
                self._unwanted = {number for number in self._unwanted if number > work.sequence}
        if run.stopped_at is None:
            return
        self._usage.count("submissions_stopped")
        _log.info("a program was stopped", submission=work.sequence, op=run.stopped_at)
        if self._journal is not None and work.stop_at is None:
            self._journal.cut(work.sequence, run.stopped_at)

    def stop(self, submissions: Iterable[int]) -> None:
        """Cancel these submissions."""
        self._usage.count("cancel_requests")
        with self._lock:
            self._unwanted.update(submissions)
            if len(self._unwanted) > limits.STOPS:
                self._unwanted = set(sorted(self._unwanted)[-limits.STOPS :])
            if self._running is not None and self._running.sequence in self._unwanted:
                self._running.halt.append(True)

    def stop_all(self) -> None:
        """Cancel all submissions: the client is gone."""
        with self._lock:
            self._nothing = True
            if self._running is not None:
                self._running.halt.append(True)

    def give_way(self) -> None:
        """Yield the device before the next op, if the session has it and another one waits."""
        with self._lock:
            work = self._running
            if work is not None and work.rest is not None and not work.halt and self.turn.turns.waiting:
                work.halt.append(False)

    def rested(self, work: RunRequest) -> bool:
        """Yield the device to waiting sessions; False if the submission was cancelled."""
        with self._lock:
            if any(work.halt):
                return False
            work.halt.clear()
        self._usage.count("submission_yields")
        work.rested += self.turn.rest()
        return not any(work.halt)

    def busy(self) -> bool:
        """True if a submission has been running, or waiting for its turn, for at least `LOOK_SECONDS`."""
        return self._running is not None and time.perf_counter() - self._since >= LOOK_SECONDS


class CancellationMonitor:
    """A thread that reads the connections of a process's sessions while they compute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[int, tuple[CancellationState, ExecutorChannel]] = {}
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, wanted: CancellationState, connection: ExecutorChannel) -> Iterator[None]:
        """Monitor a session inside the block; a session without a lease is not monitored while it computes."""
        if not connection.reads_ahead:
            yield
            return
        with self._lock:
            self._sessions[id(wanted)] = wanted, connection
            self._some.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="djinn-cancellation-monitor", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._sessions[id(wanted)]
                if not self._sessions:
                    self._some.clear()

    def _run(self) -> None:
        while True:
            self._some.wait()
            time.sleep(LOOK_SECONDS)
            with self._lock:
                sessions = list(self._sessions.values())
            for wanted, connection in sessions:
                if wanted.busy():
                    try:
                        look(wanted, connection)
                        wanted.give_way()
                    except Exception as error:
                        _log.exception("a session that computes could not be looked after", error=repr(error))


def look(wanted: CancellationState, connection: ExecutorChannel) -> None:
    """Read what has arrived while a session computes, and detect that its client is gone."""
    try:
        came = connection.read_ahead(limits.AHEAD_FRAMES, limits.AHEAD_BYTES)
    except ProtocolError as error:
        _log.debug("what came cannot be read; the session will see", error=str(error))
        return
    except TransportError as error:
        if connection.gone():
            _log.warning("a program is stopped: its client has not come back", reason=str(error))
            wanted.stop_all()
        return
    for frame in came:
        stop_as(frame, wanted)


def stop_as(frame: Frame, wanted: CancellationState) -> None:
    """Cancel the submissions that a frame names, if it is such a message."""
    if frame.body:
        return
    try:
        message = decode(frame.head)
    except ProtocolError:
        return  # the session finds that as well, and reports it
    if isinstance(message, CancelSubmissions):
        wanted.stop(message.submissions)
