"""Watch of an accelerator: detect a lost device and a hung kernel, name the op that caused it, and end the executor.

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

LOOK_SECONDS: Final = 0.25
ANSWER_SECONDS: Final = 1.0  # for which a device that looks hung may still run its queue
_log = get_logger("djinn.server")


class OpSync(OpTimes):
    """Synchronize with the device after each op, in place of timing the ops."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._synchronize = runtime.synchronize

    def begin(self) -> None:
        """Do nothing."""

    def end(self, _: int, __: Any) -> None:
        """Wait for the op, and raise its error."""
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
        each: True if the ops run one at a time.
        reached: event after the last op; None while the session issues ops.
        step: number of the op that the watch saw last.
        since: time at which this op was first seen, or at which `reached` was recorded.
    """

    session: CancellationState
    submission: int
    template: CompiledTemplate
    progress: Progress
    each: bool = False
    reached: Any = None
    step: int = -1
    since: float = attrs.field(factory=time.monotonic)

    def stands_since(self) -> float:
        """Return the time since which the session issues the same op; infinity while it has yielded the device."""
        step = self.progress.step
        if step != self.step:
            self.step, self.since = step, time.monotonic()
        return math.inf if self.progress.paused else self.since


class DeviceWatch:
    """Thread that monitors the progress of an accelerator's work.

    If a session yields the device in the middle of a submission, other submissions are issued before its end.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._lost: Callable[[str], None] = lambda _: None
        self._runtime = runtime
        self._issuing: list[IssuedWork] = []
        self._issued: deque[IssuedWork] = deque()  # in the order in which the device completes them
        self._progress = 0.0  # when a submission was last seen completed
        self._lock = threading.RLock()
        self._is_lost = False

    def start(self, lost: Callable[[str], None]) -> None:
        """Start to watch.

        `lost`: called once, with the reason, if no op can run on the device any more. It ends the process.
        """
        self._lost = lost
        threading.Thread(target=self._run, name="djinn-device-watch", daemon=True).start()

    def begin(self, session: CancellationState, work: RunRequest, template: CompiledTemplate) -> IssuedWork:
        """Note that a session begins to issue the ops of a submission, until `issued` is called."""
        one_at_a_time = session.replaying and work.op_times is None
        if one_at_a_time:
            work.op_times = OpSync(self._runtime)
        work.progress = Progress()
        begun = IssuedWork(session, work.sequence, template, work.progress, one_at_a_time)
        with self._lock:
            self._issuing.append(begun)
        return begun

    def issued(self, work: IssuedWork) -> None:
        """Note that the ops of a submission have been issued."""
        try:
            work.reached = self._runtime.mark()
        except RuntimeError as error:
            self.check(error)
        with self._lock:
            self._issuing.remove(work)
            if work.reached is not None:
                work.since = time.monotonic()
                self._issued.append(work)

    def completed(self) -> None:
        """Note which submissions are complete. If an event raises an error of a lost device, report the loss."""
        try:
            with self._lock:
                while self._issued and self._issued[0].reached.query():
                    self._issued.popleft()
                    self._progress = time.monotonic()
        except RuntimeError as error:
            self.check(error)

    def check_failures(self, found: Iterable[object], session: CancellationState) -> None:
        """Report a lost device if a result among `found` is a `Failure` with such an error."""
        for result in found:
            if isinstance(result, Failure):
                kind = torch.AcceleratorError if result.kind == torch.AcceleratorError.__name__ else RuntimeError
                self.check(kind(result.message), result.instruction, session)

    def check(self, error: BaseException, op: int = -1, session: CancellationState | None = None) -> None:
        """Report a lost device if `error` is such an error.

        `op`: op of the session's last submission; -1: the error came from another call.
        """
        if not self._runtime.is_lost(error):
            return
        with self._lock:
            every = [*self._issued, *self._issuing]
            submission = every[0] if len(every) == 1 else None
            if submission is None:
                last = next((work for work in reversed(every) if session is None or work.session is session), None)
                text = f" {_name(last, op)} or" if last is not None else ""
                self._end(f"an op failed at or before{text} one of {len(every)} submissions: {error}")
            elif submission.each or op == 0:
                at = submission.progress.step if op < 0 else op
                self._stop(submission, at, f"{_name(submission, at)} failed: {error}")
            else:
                at = op if op >= 0 else submission.template.count - 1
                self._stop(submission, 0, f"an op at or before {_name(submission, at)} failed: {error}")

    def poll(self) -> None:
        """Note which submissions are complete. Report a lost device, a hung kernel or a hung copy."""
        self.completed()
        hung = self._hung()
        if hung is None:
            if self._copies_stand() and not self._device_answers() and self._copies_stand():
                self._end(f"a copy between host and device hangs: {self._late()}")
        elif hung.reached is None and self._device_answers():  # the session is busy on the host
            hung.since = time.monotonic()
        elif self._hung() is hung:
            self._report(hung)

    def _hung(self) -> IssuedWork | None:
        """Return the oldest submission if one of its kernels seems to hang, else None."""
        with self._lock:
            late = time.monotonic() - self._runtime.hang_seconds
            if self._progress > late:
                return None
            if self._issued:
                return self._issued[0] if self._issued[0].since < late else None
            return next((work for work in self._issuing if work.stands_since() < late), None)

    def _copies_stand(self) -> bool:
        return max(self._progress, self._runtime.waits_since()) < time.monotonic() - self._runtime.hang_seconds

    def _late(self) -> str:
        return f"nothing was completed for {self._runtime.hang_seconds:g} s"

    def _device_answers(self) -> bool:
        """Return True if the device completes its queue.

        If the queue of the device is full, a call may block. So another thread makes the call.
        """
        answered = threading.Event()

        def ask() -> None:
            try:
                self._runtime.synchronize()
            except RuntimeError as error:
                self.check(error)
            answered.set()

        threading.Thread(target=ask, name="djinn-device-question", daemon=True).start()
        return answered.wait(ANSWER_SECONDS)

    def _report(self, hung: IssuedWork) -> None:
        op = hung.template.count - 1 if hung.reached is not None else hung.progress.step
        name = _name(hung, op)
        with self._lock:
            if hung.reached is None and len(self._issuing) > 1:
                self._end(f"an op at or before {name} or one of {len(self._issuing)} submissions hangs: {self._late()}")
            elif hung.each and hung.reached is None:
                self._stop(hung, op, f"{name} hangs: {self._late()}")
            else:
                self._stop(hung, 0, f"an op at or before {name} hangs: {self._late()}")

    def _stop(self, work: IssuedWork, op: int, reason: str) -> None:
        """Make a recovery of the session stop the submission before this op, which caused the error."""
        if not self._is_lost:
            work.session.stop_before(work.submission, op, reason)
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        _log.error("this executor ends, and sessions with a journal are recovered", reason=reason)
        self._lost(f"the device is lost: {reason}")

    def _run(self) -> None:
        while not self._is_lost:
            time.sleep(LOOK_SECONDS)
            self.poll()


def _name(work: IssuedWork, op: int) -> str:
    """Return the name of an op for a message."""
    steps = work.template.steps
    name = steps[op].op if 0 <= op < len(steps) else "the end"
    return f"{name} (op {op} of submission {work.submission})" if op >= 0 else f"submission {work.submission}"
