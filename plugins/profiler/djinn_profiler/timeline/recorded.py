"""Raw records of a timeline: what each thread did, and what became of each submission. Moments are `time.perf_counter()`."""

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
from djinn_core.system.front_end import called
from djinn_core.wire.messages import Timing
from djinn_core.wire.timing_messages import ExecutionTimes
from djinn_profiler.timeline.module_changes import Keys
from djinn_profiler.timeline.user_places import UserPlace

NO_NODE: Final = 2**64 - 1  # as `node_sequence_number` says
_SECOND: Final = 10**9  # in nanoseconds
SEND: Final = "send"
WAIT: Final = "wait"
"""Kinds of spans that are looked at here; the others are `plan`, `upload` and `connect`."""


@attrs.frozen
class UserLine:
    """A line of the user's program; an empty `file`: none is known."""

    file: str = ""
    line: int = 0
    function: str = ""

    def __str__(self) -> str:
        return f"{called(self.file)}:{self.line} in {self.function}" if self.file else ""


@attrs.define
class Span:
    """Something that a thread of the client did from `begun` to `ended`.

    Attributes:
        kind: what it was: `plan`, `send`, `upload`, `connect` or `wait`. name: to show.
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


# What becomes a `Span`: its kind, name, beginning and end, the place in the program that a wait was in, executor and number. A plain tuple, which is
# made in a fifth of the time.
Noted = tuple[str, str, float, float, UserPlace | None, int, int]


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
        calls: for each call on the device when it began, when it ended and the op, one after the other in one list. times: the same
            of ops that Python did not see, as C++ gives them, until `merge_times`.
        moments: when the thread entered what, one after the other in one list, while the block lasts: a weak reference to a module, `BACKWARD`, the
            number of an autograd node, or None where the thread left one of the former two. changes: what `module_changes` found in them at its end.
        inside: for each of what the thread is inside of, whether it is a backward pass.
        noted: what it did besides; `spans` at the block's end. ranges: those that have ended. open: those that have not.
        unplaced: submissions that the thread is sending.
        sent: instructions that were taken from its recorder so far.
    """

    name: str
    recorder: Recorder
    number: int
    calls: list[Any] = attrs.field(factory=list)
    times: list[torch.Tensor] = attrs.field(factory=list)
    moments: list[Any] = attrs.field(factory=lambda: [0.0, None])
    inside: list[bool] = attrs.field(factory=list)
    changes: list[tuple[float, Keys, tuple[str, ...]]] = attrs.field(factory=list)
    noted: list[Noted] = attrs.field(factory=list)
    spans: list[Span] = attrs.field(factory=list)
    ranges: list[Range] = attrs.field(factory=list)
    open: list[tuple[str, float, int]] = attrs.field(factory=list)
    unplaced: list[SubmissionRecord] = attrs.field(factory=list)
    sent: int = 0

    @property
    def count(self) -> int:
        """Number of calls."""
        return len(self.calls) // 3 + sum(map(len, self.times))

    def take_times(self) -> None:
        """Take what C++ has noted of the thread's ops."""
        if self.recorder.program >= 0 and (times := ops.take_times(self.recorder.program)).numel():
            self.times.append(times.view(-1, 4))

    def nodes(self) -> list[tuple[float, int]]:
        """When ops began in backward passes, and the autograd nodes that these were at, in order; ops that Python did not see."""
        found = [times[times[:, 3] != -1] for times in self.times]
        rows = sorted((begun, node) for times in found for begun, _, _, node in times.tolist())
        return [(begun / _SECOND, node if node >= 0 else NO_NODE) for begun, node in rows]

    def merge_times(self) -> None:
        """Move `times` to `calls`. Calls are in the order of their ends."""
        if self.times:
            rows = [row for times in self.times for row in times.tolist()]
            names = {op: ops.op_name(op).replace("::", ".") for op in {row[2] for row in rows}}
            seen = [(begun / _SECOND, ended / _SECOND, names[op]) for begun, ended, op, _ in rows]
            both = sorted([*zip(*[iter(self.calls)] * 3, strict=True), *seen], key=lambda call: call[1])
            self.calls, self.times = list(chain.from_iterable(both)), []

    @property
    def did_anything(self) -> bool:
        """True if there is something to show."""
        return bool(self.calls or self.times or self.spans or self.changes or self.ranges)

    @property
    def recorded(self) -> int:
        """Instructions that the thread has recorded so far."""
        return self.sent + self.recorder.unsent


@attrs.define(eq=False)
class SubmissionRecord:
    """Record of one submission to one executor.

    Attributes:
        begun: its template was being bound; sending: its frame was being sent, until `sent`. nbytes: of the frame.
        received: its reply was read, with `fetched` bytes of tensors; 0: it was not yet.
        site: place of its last instruction in the program. answered: whether a caller waits for what it brings. instructions: of the template.
        line: of the wait for it, or of `site`; at the block's end.
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
