"""Raw records of a timeline: events of each thread, and phases of each submission.

All times are `time.perf_counter()`.
"""

from __future__ import annotations

from itertools import chain
from types import CodeType
from typing import Any, Final

import attrs
import torch

from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.recorder import Recorder
from djinn_client.runtime.sending.template import PreparedTemplate
from djinn_core.ir.program import Program
from djinn_core.system.front_end import display_name
from djinn_core.wire.messages import Timing
from djinn_core.wire.timing_messages import ExecutionTimes
from djinn_profiler.timeline.module_changes import Keys
from djinn_profiler.timeline.user_places import UserPlace

NO_NODE: Final = 2**64 - 1  # the value of `node_sequence_number` without a node
_SECOND: Final = 10**9  # nanoseconds per second
SEND: Final = "send"
WAIT: Final = "wait"
"""Kinds of spans with special treatment; the others are `plan`, `upload` and `connect`."""


@attrs.frozen
class UserLine:
    """A line of the user's program. `file` is empty if the line is unknown."""

    file: str = ""
    line: int = 0
    function: str = ""

    def __str__(self) -> str:
        return f"{display_name(self.file)}:{self.line} in {self.function}" if self.file else ""


@attrs.define
class Span:
    """An activity of a client thread from `begun` to `ended`.

    Attributes:
        kind: `plan`, `send`, `upload`, `connect` or `wait`.
        name: name to show.
        line: the user's line that caused it.
        cause: reason of a wait, as in `djinn.explain_waits()`.
        executor: executor of its submission.
        number: number of its submission; 0: none.
    """

    kind: str
    name: str
    begun: float
    ended: float
    line: UserLine = UserLine()
    cause: str = ""
    executor: int = 0
    number: int = 0


# Raw form of a `Span`: kind, name, start, end, place in the program of a wait, executor and number. A plain tuple, because creating
# one takes a fifth of the time.
Activity = tuple[str, str, float, float, UserPlace | None, int, int]


@attrs.frozen
class Range:
    """A range of `torch.profiler.record_function`. In it, instructions `first` to `stop` (exclusive) were recorded."""

    name: str
    begun: float
    ended: float
    first: int
    stop: int


@attrs.define(eq=False)
class ThreadRecord:
    """Record of one thread.

    Attributes:
        name: name of the thread.
        recorder: its recorder.
        number: its number, in order of first appearance.
        calls: flat list of start, end and op of each call on the device.
        times: tensors with times of ops that only C++ saw; `merge_times` moves them to `calls`.
        moments: flat list of times and entered scopes during the block. A scope is a weak reference to a module,
            `BACKWARD`, or the number of an autograd node. None: the thread left a module or `BACKWARD`.
        changes: result of `module_changes` at the block's end.
        scopes: for each open scope of the thread, True if it is a backward pass.
        activities: raw records of plans, uploads, sends, connections and waits.
        spans: `activities` as spans; set at the block's end.
        ranges: ended ranges.
        open_ranges: open ranges.
        sending_submissions: submissions that the thread is sending.
        sent: number of instructions that its recorder has handed over for submission so far.
    """

    name: str
    recorder: Recorder
    number: int
    calls: list[Any] = attrs.field(factory=list)
    times: list[torch.Tensor] = attrs.field(factory=list)
    moments: list[Any] = attrs.field(factory=lambda: [0.0, None])
    scopes: list[bool] = attrs.field(factory=list)
    changes: list[tuple[float, Keys, tuple[str, ...]]] = attrs.field(factory=list)
    activities: list[Activity] = attrs.field(factory=list)
    spans: list[Span] = attrs.field(factory=list)
    ranges: list[Range] = attrs.field(factory=list)
    open_ranges: list[tuple[str, float, int]] = attrs.field(factory=list)
    sending_submissions: list[SubmissionRecord] = attrs.field(factory=list)
    sent: int = 0

    @property
    def count(self) -> int:
        """Return the number of calls."""
        return len(self.calls) // 3 + sum(map(len, self.times))

    def take_times(self) -> None:
        """Append the times of ops that C++ recorded since the last call to `times`."""
        if self.recorder.program >= 0 and (times := ops.take_times(self.recorder.program)).numel():
            self.times.append(times.view(-1, 4))

    def nodes(self) -> list[tuple[float, int]]:
        """Return start and autograd node of each op that only C++ saw in a backward pass, in order."""
        node_times = [times[times[:, 3] != -1] for times in self.times]
        rows = sorted((begun, node) for times in node_times for begun, _, _, node in times.tolist())
        return [(begun / _SECOND, node if node >= 0 else NO_NODE) for begun, node in rows]

    def merge_times(self) -> None:
        """Move `times` to `calls`. Calls are ordered by their ends."""
        if self.times:
            rows = [row for times in self.times for row in times.tolist()]
            names = {op: ops.op_name(op).replace("::", ".") for op in {row[2] for row in rows}}
            named_times = [(begun / _SECOND, ended / _SECOND, names[op]) for begun, ended, op, _ in rows]
            merged = sorted([*zip(*[iter(self.calls)] * 3, strict=True), *named_times], key=lambda call: call[1])
            self.calls, self.times = list(chain.from_iterable(merged)), []

    @property
    def has_records(self) -> bool:
        """Return True if the thread issued an op or had an activity."""
        return bool(self.calls or self.times or self.spans or self.changes or self.ranges)

    @property
    def recorded(self) -> int:
        """Return the number of instructions that the thread has recorded so far."""
        return self.sent + self.recorder.unsent


@attrs.define(eq=False)
class SubmissionRecord:
    """Record of one submission to one executor.

    Attributes:
        begun: time at which the binding of its template began.
        sending: time at which sending of its frame, of `nbytes` bytes, began.
        sent: time at which sending of its frame ended.
        received: time at which its reply was read, with `fetched` bytes of tensors; 0: no reply yet.
        site: position of its last instruction in the user's code.
        answered: True if a caller waits for its results.
        instructions: number of instructions in the template.
        line: line of its wait, or of `site`; set at the block's end.
        prepared: its plan, if it runs ops.
        program: the instructions of `thread` from `first` on, or None if instructions are not timed.
        failures: number of failed instructions.
    """

    executor: int
    number: int
    thread: ThreadRecord
    first: int
    begun: float
    sending: float
    sent: float
    nbytes: int
    site: tuple[CodeType | None, int]
    answered: bool
    instructions: int
    prepared: PreparedTemplate | None
    program: Program | None = None
    received: float = 0.0
    fetched: int = 0
    failures: int = 0
    timing: Timing = attrs.field(factory=Timing)
    times: ExecutionTimes | None = None
    line: UserLine = UserLine()
