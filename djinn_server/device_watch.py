"""Watch of an accelerator: finds a lost device and a hung kernel, says which op caused it, and ends the executor.

Ops are issued before they run, so an error comes at some later call. The watch knows which submissions the device has completed.
A session that is recovered on an accelerator runs each op alone (`OpSync`), so that an error which comes again has one op.
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

from djinn_core.hookspecs.devices import DeviceRuntime
from djinn_core.logs import get_logger
from djinn_core.wire.message_base import Failure
from djinn_server.running.cancellation import CancellationState
from djinn_server.running.run_request import RunRequest
from djinn_server.running.template_compiler import CompiledTemplate
from djinn_server.running.timings import OpTimes

LOOK_SECONDS: Final = 0.25
_log = get_logger("djinn.server")


class OpSync(OpTimes):
    """Waits for the device after each op, in place of timing it.

    Attributes:
        op: number of the op that runs, or runs next. since: when it began; infinite while none runs.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._synchronize = runtime.synchronize
        self.op, self.since = 0, math.inf

    def begin(self) -> None:
        """Note the time."""
        self.since = time.monotonic()

    def end(self, instruction: int, _: Any) -> None:
        """Wait for the op. Raise its error."""
        self._synchronize()
        self.op, self.since = instruction + 1, math.inf

    def packed(self, _: int) -> bytes:
        """Return nothing: ops were not timed."""
        return b""


@attrs.define(eq=False)
class IssuedWork:
    """A submission whose ops the device may not have completed.

    Attributes:
        session: cancels the session's submissions, and has its journal.
        template: has the ops.
        each: set if the ops run one at a time.
        reached: event after the last op; None while the session issues ops. since: when it was recorded.
    """

    session: CancellationState
    submission: int
    template: CompiledTemplate
    each: OpSync | None = None
    reached: Any = None
    since: float = 0.0


class DeviceWatch:
    """The work of one accelerator, and the thread that looks whether it goes on.

    Sessions that yield the device in the middle of a submission have other sessions' submissions issued before its end.

    Attributes:
        lost: is told the reason, once, when no op can run on the device any more. It ends the process.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.lost: Callable[[str], None] = lambda _: None
        self._runtime = runtime
        self._issuing: list[IssuedWork] = []
        self._issued: deque[IssuedWork] = deque()  # in the order in which the device completes them
        self._progress = 0.0  # when a submission was last seen completed
        self._lock = threading.RLock()
        self._some = threading.Event()
        self._is_lost = False
        self._thread: threading.Thread | None = None

    def begin(self, session: CancellationState, work: RunRequest, template: CompiledTemplate) -> IssuedWork:
        """Note that a session, which holds the turn on the device, issues the ops of a submission until `issued`."""
        each = None
        if session.replaying and work.op_times is None:
            work.op_times = each = OpSync(self._runtime)
        work.relieve = self._runtime.relieve
        begun = IssuedWork(session, work.sequence, template, each)
        with self._lock:
            self._issuing.append(begun)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="djinn-device-watch", daemon=True)
            self._thread.start()
        self._some.set()
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
        """Take in what the device has completed. Report the device as lost if it says so."""
        try:
            with self._lock:
                while self._issued and self._issued[0].reached.query():
                    self._issued.popleft()
                    self._progress = time.monotonic()
        except RuntimeError as error:
            self.check(error)

    def check_failures(self, found: Iterable[object], session: CancellationState) -> None:
        """Report the device as lost if one of the `Failure`s of a session among these says so."""
        for one in found:
            if isinstance(one, Failure):
                kind = torch.AcceleratorError if one.kind == torch.AcceleratorError.__name__ else RuntimeError
                self.check(kind(one.message), one.instruction, session)

    def check(self, error: BaseException, op: int = -1, session: CancellationState | None = None) -> None:
        """Report the device as lost if it is, after an error at an op of the session's last submission (-1: at another call)."""
        if not self._runtime.is_lost(error):
            return
        with self._lock:
            every = [*self._issued, *self._issuing]
            known = every[0] if len(every) == 1 else None
            if known is None:
                last = next((work for work in reversed(every) if session is None or work.session is session), None)
                text = f" {_name(last, op)} or" if last is not None else ""
                self._end(f"an op failed at or before{text} one of {len(every)} submissions: {error}")
            elif known.each is not None or op == 0:
                at = known.each.op if op < 0 and known.each is not None else op
                self._stop(known, at, f"{_name(known, at)} failed: {error}")
            else:
                at = op if op >= 0 else known.template.count - 1
                self._stop(known, 0, f"an op at or before {_name(known, at)} failed: {error}")

    def look(self) -> None:
        """Take in what the device has completed, and report a lost device or a hung kernel."""
        self.completed()
        with self._lock:
            if not self._issuing and not self._issued:
                self._some.clear()
                return
            limit, now = self._runtime.hang_seconds, time.monotonic()
            seconds = f"nothing was completed for {limit:g} s"
            for work in self._issuing:
                if work.each is not None and now - work.each.since > limit:
                    self._stop(work, work.each.op, f"{_name(work, work.each.op)} hangs: {seconds}")
            first = self._issued[0] if self._issued else None
            # Ops that take long to issue are no hang: the device has had the last one since `first.since` only.
            if first is not None and now - max(self._progress, first.since) > limit:
                self._stop(first, 0, f"an op at or before {_name(first, first.template.count - 1)} hangs: {seconds}")

    def _stop(self, work: IssuedWork, op: int, reason: str) -> None:
        """Have the session that caused the error stop before that op when it is recovered."""
        if not self._is_lost:
            work.session.stop_before(work.submission, op, reason)
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        _log.error("this executor ends, and sessions with a journal are recovered", reason=reason)
        self.lost(f"the device is lost: {reason}")

    def _run(self) -> None:
        while not self._is_lost:
            self._some.wait()
            time.sleep(LOOK_SECONDS)
            self.look()


def _name(work: IssuedWork, op: int) -> str:
    """Return the name of an op in a message."""
    steps = work.template.steps
    name = steps[op].op if 0 <= op < len(steps) else "the end"
    return f"{name} (op {op} of submission {work.submission})" if op >= 0 else f"submission {work.submission}"
