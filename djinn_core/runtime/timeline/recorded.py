"""Raw records of a timeline: what each thread did, and what became of each submission. Moments are `time.perf_counter()`."""

from __future__ import annotations

from typing import Any

import attrs

from djinn_core.front_end import called
from djinn_core.interception.recording.recorder import Recorder
from djinn_core.ir.module_path import ModuleCall
from djinn_core.ir.program import Program
from djinn_core.runtime.sending.template import Prepared
from djinn_core.wire.messages import Timing
from djinn_core.wire.timing_messages import ExecutionTimes


@attrs.frozen
class UserLine:
    """A line of the user's program; an empty `file`: none is known."""

    file: str = ""
    line: int = 0
    function: str = ""

    def __str__(self) -> str:
        return f"{called(self.file)}:{self.line} in {self.function}" if self.file else ""


@attrs.frozen
class Span:
    """Something that a thread of the client did from `begun` to `ended`.

    Attributes:
        kind: as `TimelineEvent.kind`. name: as `TimelineEvent.name`.
        line: that caused it. cause: what was waited for, as in `djinn.explain_waits()`.
        executor, number: the submission that it was for; 0: none.
    """

    kind: str
    name: str
    begun: float
    ended: float
    line: UserLine = UserLine()
    cause: str = ""
    executor: int = 0
    number: int = 0


@attrs.frozen
class Range:
    """A range of `torch.profiler.record_function`, and the instructions that its thread recorded inside: from `first` to before `stop`."""

    name: str
    begun: float
    ended: float
    first: int
    stop: int


@attrs.define(eq=False)
class ThreadRecord:
    """Record of one thread.

    Attributes:
        name: the thread's. recorder: its recorder. number: in the order in which threads were seen.
        calls: for each call on the device when it began, when it ended and the op, one after the other in one list.
        modules: numbers of calls from which on the thread was in another module, and which.
        paths: names of modules by position among `modules`, as far as they are known yet.
        spans: what it did besides. ranges: those that have ended. open: those that have not.
        entered: what it is in the middle of. module: the call of a module that it was in at the last op.
        sent: instructions that were taken from its recorder so far.
    """

    name: str
    recorder: Recorder
    number: int
    calls: list[Any] = attrs.field(factory=list)
    modules: list[tuple[int, ModuleCall | None]] = attrs.field(factory=list)
    paths: list[tuple[str, ...]] = attrs.field(factory=list)
    spans: list[Span] = attrs.field(factory=list)
    ranges: list[Range] = attrs.field(factory=list)
    open: list[tuple[str, float, int]] = attrs.field(factory=list)
    entered: list[tuple[str, float, int]] = attrs.field(factory=list)
    module: ModuleCall | None = None
    sent: int = 0

    @property
    def count(self) -> int:
        """Number of calls."""
        return len(self.calls) // 3

    @property
    def recorded(self) -> int:
        """Instructions that the thread has recorded so far."""
        return self.sent + len(self.recorder.entries)


@attrs.define(eq=False)
class SubmissionRecord:
    """Record of one submission to one executor.

    Attributes:
        begun: its template was being bound; sending: its frame was being sent, until `sent`. nbytes: of the frame.
        received: its answer was read, with `fetched` bytes of tensors; 0: it was not yet.
        line: at which it was sent; where nothing waits for it, that of its last instruction. instructions: of the template.
        prepared: its plan, where it runs anything. program: whose instructions are those of `thread` from `first` on; None where times of
            instructions were not asked for.
        failures: instructions that failed.
    """

    executor: int
    number: int
    thread: ThreadRecord
    first: int
    begun: float
    sending: float
    sent: float
    nbytes: int
    line: UserLine
    instructions: int
    prepared: Prepared | None
    program: Program | None = None
    received: float = 0.0
    fetched: int = 0
    failures: int = 0
    timing: Timing = attrs.field(factory=Timing)
    times: ExecutionTimes | None = None
