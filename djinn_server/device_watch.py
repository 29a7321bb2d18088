"""Detect a lost accelerator or a hung kernel, name the op that caused it, and end the executor.

Ops are issued before they run, so an error appears at a later call. The watch knows which submissions the device has
completed. If a session is recovered on an accelerator, each of its ops runs alone (`OpSync`), so that a repeated error
can be assigned to one op.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import attrs
import torch

from djinn_core.logs import get_logger
from djinn_core.wire.message_base import Failure
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.running.cancellation import CancellationState
from djinn_server.running.run_request import Progress, RunRequest
from djinn_server.running.template_compiler import CompiledTemplate
from djinn_server.running.timings import OpTimes

POLL_SECONDS: Final = 0.25
ANSWER_SECONDS: Final = 1.0  # in which a device that seems to hang must complete its queue
_log = get_logger("djinn.server")


class OpSync(OpTimes):
    """Synchronize with the device after each op, instead of timing the ops."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._synchronize = runtime.synchronize

    def begin(self) -> None:
        """Do nothing."""

    def end(self, _: int, __: Any) -> None:
        """Wait for the op. Raise its error if it failed."""
        self._synchronize()

    def packed(self, _: int) -> bytes:
        """Return empty bytes, because ops were not timed."""
        return b""


@attrs.define(eq=False)
class IssuedWork:
    """A submission whose ops the device may not have completed.

    Attributes:
        session: cancellation state and journal of the session.
        template: the template with the ops.
        progress: number of the op that the session is issuing.
        one_by_one: True if each op is synchronized before the next one is issued.
        end_event: event after the last op; None while the session issues ops.
        step: number of the op that the watch saw last.
        since: time at which `step` was first seen, or at which `end_event` was recorded (`time.monotonic`).
    """

    session: CancellationState
    submission: int
    template: CompiledTemplate
    progress: Progress
    one_by_one: bool = False
    end_event: Any = None
    step: int = -1
    since: float = attrs.field(factory=time.monotonic)

    def stalled_since(self) -> float:
        """Return when the watch first saw the present op; infinity while the session has yielded the device."""
        step = self.progress.step
        if step != self.step:
            self.step, self.since = step, time.monotonic()
        return math.inf if self.progress.paused else self.since


class DeviceWatch:
    """Monitor the progress of an accelerator's work in a thread.

    Several submissions can be in progress: if a session yields the device during one, other sessions issue theirs.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._end_process: Callable[[str], None] = lambda _: None
        self._runtime = runtime
        self._issuing: list[IssuedWork] = []
        self._issued: deque[IssuedWork] = deque()  # in the order in which the device completes them
        self._last_completed_at = 0.0  # when a submission was last seen completed
        self._lock = threading.RLock()
        self._is_lost = False

    def start(self, end_process: Callable[[str], None]) -> None:
        """Start the thread. `end_process`: called once, with the reason, if no op can run on the device any more."""
        self._end_process = end_process
        threading.Thread(target=self._run, name="djinn-device-watch", daemon=True).start()

    def begin(self, session: CancellationState, work: RunRequest, template: CompiledTemplate) -> IssuedWork:
        """Note that a session begins to issue the ops of a submission. The session calls `issued` at the end."""
        one_by_one = session.replaying and work.op_times is None
        if one_by_one:
            work.op_times = OpSync(self._runtime)
        work.progress = Progress()
        issuing = IssuedWork(session, work.sequence, template, work.progress, one_by_one)
        with self._lock:
            self._issuing.append(issuing)
        return issuing

    def issued(self, work: IssuedWork) -> None:
        """Note that the ops of a submission have been issued."""
        try:
            work.end_event = self._runtime.mark()
        except RuntimeError as error:
            self.check(error)
        with self._lock:
            self._issuing.remove(work)
            if work.end_event is not None:
                work.since = time.monotonic()
                self._issued.append(work)

    def completed(self) -> None:
        """Note which submissions are complete. If an event raises an error of a lost device, report the loss."""
        try:
            with self._lock:
                while self._issued and self._issued[0].end_event.query():
                    self._issued.popleft()
                    self._last_completed_at = time.monotonic()
        except RuntimeError as error:
            self.check(error)

    def check_failures(self, results: Iterable[object], session: CancellationState) -> None:
        """Report the device as lost if one of `results` is a `Failure` with the error of a lost device."""
        for result in results:
            if isinstance(result, Failure):
                kind = torch.AcceleratorError if result.kind == torch.AcceleratorError.__name__ else RuntimeError
                self.check(kind(result.message), result.instruction, session)

    def check(self, error: BaseException, op: int = -1, session: CancellationState | None = None) -> None:
        """Report the device as lost if `error` is the error of a lost device.

        `op`: number of the op in the last submission of `session`; -1: the error came from another call.
        """
        if not self._runtime.is_lost(error):
            return
        with self._lock:
            submissions = [*self._issued, *self._issuing]
            submission = submissions[0] if len(submissions) == 1 else None
            if submission is None:
                last = next(
                    (work for work in reversed(submissions) if session is None or work.session is session), None
                )
                latest = f", at or before {_name(last, op)}" if last is not None else ""
                self._end(f"an op in one of {len(submissions)} submissions failed{latest}: {error}")
            elif submission.one_by_one or op == 0:
                step = submission.progress.step if op < 0 else op
                self._stop(submission, step, f"{_name(submission, step)} failed: {error}")
            else:
                step = op if op >= 0 else submission.template.count - 1
                self._stop(submission, 0, f"an op at or before {_name(submission, step)} failed: {error}")

    def poll(self) -> None:
        """Note which submissions are complete. Report a lost device, a hung kernel or a hung copy."""
        self.completed()
        hung = self._hung()
        if hung is None:
            if self._copies_hang() and not self._device_answers() and self._copies_hang():
                self._end(f"a copy between host and device hangs: {self._delay_note()}")
        elif hung.end_event is None and self._device_answers():  # the session is busy on the host
            hung.since = time.monotonic()
        elif self._hung() is hung:
            self._report(hung)

    def _hung(self) -> IssuedWork | None:
        """Return the first submission that seems to hang, or None."""
        with self._lock:
            late = time.monotonic() - self._runtime.hang_seconds
            if self._last_completed_at > late:
                return None
            if self._issued:
                return self._issued[0] if self._issued[0].since < late else None
            return next((work for work in self._issuing if work.stalled_since() < late), None)

    def _copies_hang(self) -> bool:
        return max(self._last_completed_at, self._runtime.waits_since()) < time.monotonic() - self._runtime.hang_seconds

    def _delay_note(self) -> str:
        return f"nothing completed for {self._runtime.hang_seconds:g} s"

    def _device_answers(self) -> bool:
        """Return True if the device completes its queue within `ANSWER_SECONDS`.

        The call is made in another thread, because it blocks while the device hangs.
        """
        completion = threading.Event()

        def synchronize() -> None:
            try:
                self._runtime.synchronize()
            except RuntimeError as error:
                self.check(error)
            completion.set()

        threading.Thread(target=synchronize, name="djinn-device-question", daemon=True).start()
        return completion.wait(ANSWER_SECONDS)

    def _report(self, hung: IssuedWork) -> None:
        op = hung.template.count - 1 if hung.end_event is not None else hung.progress.step
        name = _name(hung, op)
        with self._lock:
            if hung.end_event is None and len(self._issuing) > 1:
                count = len(self._issuing)
                self._end(f"an op in one of {count} submissions hangs, at or before {name}: {self._delay_note()}")
            elif hung.one_by_one and hung.end_event is None:
                self._stop(hung, op, f"{name} hangs: {self._delay_note()}")
            else:
                self._stop(hung, 0, f"an op at or before {name} hangs: {self._delay_note()}")

    def _stop(self, work: IssuedWork, op: int, reason: str) -> None:
        """End the process. Let a recovery stop the submission before `op`, so that the error does not recur."""
        if not self._is_lost:
            work.session.stop_before(work.submission, op, reason)
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        _log.error("the device is lost: this executor ends; sessions with a journal are recovered", reason=reason)
        self._end_process(f"the device is lost: {reason}")

    def _run(self) -> None:
        while not self._is_lost:
            time.sleep(POLL_SECONDS)
            self.poll()


def _name(work: IssuedWork, op: int) -> str:
    """Return, for messages, `aten::mm (op 2 of submission 4)`, or `submission 4` if `op` is -1."""
    steps = work.template.steps
    name = steps[op].op if 0 <= op < len(steps) else "the end"
    return f"{name} (op {op} of submission {work.submission})" if op >= 0 else f"submission {work.submission}"
