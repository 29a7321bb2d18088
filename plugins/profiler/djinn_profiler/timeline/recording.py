"""Recording of a timeline: hooks that are installed only while `djinn.profile()` is active.

C++ records when each op begins and ends. Taps record ops that Python records, modules, submissions and waits. Lines,
names, spans and events are derived when the block has ended. Limits bound the memory of a long run: records above them
are only counted.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import attrs
import torch
from torch.autograd.profiler import record_function

from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.recorder import Recorder, current, recorders
from djinn_client.interception.tap import Cause, Tap, taps
from djinn_client.runtime.sending.binding import PendingSubmission
from djinn_client.torch_dispatch import node_sequence_number
from djinn_core.errors import DjinnError
from djinn_core.hookspecs.observers import Event, Observer
from djinn_core.wire.messages import Completed
from djinn_profiler.timeline.clocks import ClientClock
from djinn_profiler.timeline.module_changes import ModulePaths, module_changes, with_nodes
from djinn_profiler.timeline.recorded import SEND, WAIT, Activity, Range, Span, SubmissionRecord, ThreadRecord, UserLine
from djinn_profiler.timeline.user_places import UserPlace, UserPlaces, line_of


@attrs.define
class UserLines:
    """Cache of lines of the user's code, and of the reasons of waits at these lines."""

    _lines_by_place: dict[tuple[int, int, str], tuple[UserPlace, UserLine, str]] = attrs.field(factory=dict)

    def find(self, place: UserPlace) -> tuple[UserLine, str]:
        """Return the line of a position, and the reason of a wait at it, refined by the line's text."""
        key = id(place[0]), *place[1:]
        entry = self._lines_by_place.get(key)
        if entry is None:
            file, line, function, cause = line_of(place)
            entry = self._lines_by_place[key] = place, UserLine(file, line, function), cause
        return entry[1:]


def span_of(activity: Activity, lines: UserLines) -> Span:
    """Return the span of an activity, which a thread recorded in raw form."""
    kind, name, start_time, end_time, place, executor, number = activity
    line, cause = lines.find(place) if place is not None else (UserLine(), "")
    return Span(kind, name or cause, start_time, end_time, line, cause, executor, number)


def set_lines(records: Iterable[SubmissionRecord], spans: Sequence[Span], lines: UserLines) -> None:
    """Set the line of each submission and its sending: the line that waits for the reply, else that of its last op."""
    awaited_lines: dict[tuple[int, int], UserLine] = {}
    for span in spans:
        if span.kind == WAIT and span.number:
            awaited_lines.setdefault((span.executor, span.number), span.line)
    lines_by_submission: dict[tuple[int, int], UserLine] = {}
    for record in records:
        key = record.executor, record.number
        line = awaited_lines.get(key) if record.answered else None
        lines_by_submission[key] = record.line = line or lines.find((*record.site, Cause.OTHER))[0]
    for span in spans:
        if span.kind == SEND:
            span.line = lines_by_submission.get((span.executor, span.number), span.line)


def samples_of(records: Iterable[SubmissionRecord]) -> Iterator[tuple[int, str, float, float, float, float]]:
    """Return a clock sample for each submission: executor, instance, and the arguments of `ClientClock.sample`."""
    for record in records:
        if (times := record.times) is not None:
            yield record.executor, times.instance, record.sending, times.taken, times.done, record.received


OPS_LIMIT: Final = 1_000_000  # device calls, and as many module calls, of all threads together; 72 bytes each
SUBMISSIONS_LIMIT: Final = 200_000
SPANS_LIMIT: Final = 500_000  # limit per thread


class _ThreadLists(threading.local):
    record: ThreadRecord | None = None


class _OpTimes(Tap):
    """Tap that records the times of each thread's ops, and when the thread entered and left modules."""

    def __init__(self, record_of_thread: Callable[[], ThreadRecord], names: ModulePaths) -> None:
        self._record_of_thread = record_of_thread
        self._names = names
        self._local = _ThreadLists()

    def _current_record(self) -> ThreadRecord:
        record = self._local.record
        if record is None:
            record = self._local.record = self._record_of_thread()
        return record

    def op(self, func: Any, start_time: float, end_time: float) -> None:
        """Record an op, as `Tap.op`."""
        record = self._current_record()
        record.calls.extend((start_time, end_time, func))
        if record.scopes and record.scopes[-1]:
            self._at_node(record, start_time)

    def module(self, entered: weakref.ref[torch.nn.Module] | str | None) -> None:
        """Record entry to or exit from a module, as `Tap.module`."""
        record, now = self._current_record(), time.perf_counter()
        inside = record.scopes
        if entered is None:
            if inside:
                inside.pop()
        else:
            if inside and inside[-1]:
                self._at_node(record, now)
            outermost = not inside or inside[-1]
            if outermost and not isinstance(entered, str) and (module := entered()) is not None:
                self._names.record_root(module)
            inside.append(isinstance(entered, str))
        record.moments.extend((now, entered))

    @staticmethod
    def _at_node(record: ThreadRecord, moment: float) -> None:
        number, moments = node_sequence_number(), record.moments
        if moments[-1] != number:
            moments.extend((max(moment, moments[-2]), number))


class Recording(Tap, Observer):
    """The raw records of a timeline, and the hooks that create them.

    Attributes:
        begun: start of the block.
        ended: end of the block.
        thread: the block's thread.
        ops: True if executors time each instruction.
        threads: records of threads.
        submissions: records in sending order.
        samples: additional round trips for comparing clocks: executor, instance, and the arguments of
            `ClientClock.sample`.
        clocks: clocks by executor and process; set when the block has ended.
        connected: called when a session begins in the block.
        names: names of modules.
        names_of_calls: names by identity of a module call, which its program keeps alive; set at the block's end if
            instructions are timed.
        ops_end: time after which calls were not recorded, because the limit was reached; 0: all calls were recorded.
        lost: number of submissions and spans that were dropped.
    """

    name = "djinn.profile"
    events = frozenset({"connected"})

    def __init__(self, *, ops: bool) -> None:
        self.ops = ops
        self.connected: Callable[[], None] = _nothing
        self.begun = self.ended = 0.0
        self.threads: list[ThreadRecord] = []
        self.submissions: list[SubmissionRecord] = []
        self.samples: list[tuple[int, str, float, float, float, float]] = []
        self.clocks: dict[tuple[int, str], ClientClock] = {}
        self.names = ModulePaths()
        self.names_of_calls: dict[int, tuple[str, ...]] = {}
        self.lost = 0
        self.ops_end = 0.0
        self._lock = threading.Lock()
        self._local = _ThreadLists()
        self._of: dict[int, ThreadRecord] = {}  # by identity of the recorder, which its record keeps alive
        self._submitting: deque[tuple[ThreadRecord, int, int]] = deque()  # instructions being submitted
        self._earlier = 0  # submissions of former sessions in the block: numbers continue
        self._last_number = 0
        self._asking = False
        self._pending: dict[tuple[int, int], SubmissionRecord] = {}
        self._places = UserPlaces()
        self._op_times = _OpTimes(self.current_record, self.names)
        self._keeps_calls = False
        self.thread = self.current_record()

    # --- hooks ---------------------------------------------------------------------------------------------------

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Context manager in which the hooks are installed."""
        enter, leave = record_function.__enter__, record_function.__exit__
        try:  # an interrupt must leave no hook installed
            taps.add(self)
            taps.add(self._op_times)
            ops.time_ops(True)
            for recorder in recorders.all():
                self._record_of(recorder)
            for record in self.threads:
                record.recorder.forward_calls.collect_dropped()
            self._keeps_calls = True
            record_function.__enter__ = self._range_begins(enter)  # type: ignore[method-assign]
            record_function.__exit__ = self._range_ends(leave)  # type: ignore[method-assign]
            yield
        finally:
            record_function.__enter__, record_function.__exit__ = enter, leave  # type: ignore[method-assign]
            taps.remove(self)
            self._stop_ops()
            self._finish()

    def _stop_ops(self) -> None:
        taps.remove(self._op_times)
        for recorder in recorders.all():
            self._record_of(recorder).take_times()
        ops.time_ops(False)
        self._keeps_calls = False
        for record in list(self.threads):
            record.recorder.forward_calls.stop_collecting_dropped()

    def _finish(self) -> None:
        """Look up lines, modules and clocks while modules are alive, and drop threads without records."""
        lines = UserLines()
        for call in {
            id(c): c for submission in self.submissions if submission.program for c in submission.program.modules
        }.values():
            self.names_of_calls[id(call)] = self.names.of_call(call)
        for record in list(self.threads):
            calls = record.recorder.forward_calls
            moments = with_nodes(record.moments, record.nodes())
            record.changes = list(module_changes(moments, calls, self.names))
            calls.dropped_calls = None
            record.moments = []  # another thread may still read the last one
            self._end_ranges(record)
            record.ranges.sort(key=lambda submission: submission.first)
            record.spans = [span_of(noted, lines) for noted in record.activities]
            record.activities.clear()
        self.threads = [
            submission for submission in self.threads if submission is self.thread or submission.has_records
        ]
        spans = [span for record in self.threads for span in record.spans]
        set_lines(self.submissions, spans, lines)
        samples = [*self.samples, *samples_of(self.submissions)]
        for executor, instance, *moments in sorted(samples, key=lambda submission: submission[2]):
            self.clocks.setdefault((executor, instance), ClientClock()).sample(*moments)

    def current_record(self) -> ThreadRecord:
        """Return this thread's record."""
        record = self._local.record
        if record is None or record.recorder is not current():
            record = self._local.record = self._record_of(current())
        return record

    def _record_of(self, recorder: Recorder) -> ThreadRecord:
        record = self._of.get(id(recorder))
        if record is None:
            with self._lock:
                record = self._of.get(id(recorder))
                if record is None:
                    name = recorder.thread or "a thread that has ended"
                    record = self._of[id(recorder)] = ThreadRecord(name, recorder, len(self.threads) + 1)
                    self.threads.append(record)
                    if self._keeps_calls:
                        recorder.forward_calls.collect_dropped()
        return record

    def _range_begins(self, enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def begins(entered: Any) -> Any:
            record = self.current_record()
            record.open_ranges.append((entered.name, time.perf_counter(), record.recorded))
            return enter(entered)

        return begins

    def _range_ends(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        def ends(entered: Any, *error: Any) -> Any:
            record = self.current_record()
            while record.open_ranges:
                name, start_time, first = record.open_ranges.pop()
                if len(record.ranges) < SPANS_LIMIT:
                    record.ranges.append(Range(name, start_time, time.perf_counter(), first, record.recorded))
                if name == entered.name:
                    break
            return leave(entered, *error)

        return ends

    def _end_ranges(self, record: ThreadRecord) -> None:
        for name, start_time, first in record.open_ranges:
            record.ranges.append(Range(name, start_time, time.perf_counter(), first, record.recorded))
        record.open_ranges.clear()

    # --- `Tap` ---------------------------------------------------------------------------------------------------

    def taken(self, recorder: Recorder, instructions: int) -> None:
        """Note that the recorder hands over its oldest `instructions` for submission, as `Tap.taken`."""
        record = self._record_of(recorder)
        if instructions:
            self._submitting.append((record, record.sent, instructions))
            record.sent += instructions
        count = 0
        record.take_times()
        for submission in self.threads:
            count += max(submission.count, len(submission.moments) // 4)
        if count > OPS_LIMIT and not self.ops_end:
            self.ops_end = time.perf_counter()
            self._stop_ops()

    def submitted(self, start_time: float, instructions: int) -> None:
        """Record a submission of the oldest instructions that were handed over, as `Tap.submitted`."""
        record, place = self.current_record(), self._pop_recorder(instructions)
        for submission in record.sending_submissions:
            if place is not None and submission.begun >= start_time:
                submission.thread, submission.first = place
        record.sending_submissions.clear()
        self._add(record, ("plan", "submit", start_time, time.perf_counter(), None, 0, 0))

    def uploaded(self, start_time: float) -> None:
        """Record an upload, as `Tap.uploaded`."""
        self._add(self.current_record(), ("upload", "upload", start_time, time.perf_counter(), None, 0, 0))

    def _pop_recorder(self, instructions: int) -> tuple[ThreadRecord, int] | None:
        """Return the thread of the next `instructions` (a count), and the first one's number, or None without any."""
        if not instructions or not self._submitting:
            return None
        record, first, remaining = self._submitting.popleft()
        if remaining > instructions:
            self._submitting.appendleft((record, first + instructions, remaining - instructions))
        return record, first

    def _add(self, record: ThreadRecord, noted: Activity) -> None:
        if len(record.activities) < SPANS_LIMIT:
            record.activities.append(noted)
        else:
            self.lost += 1

    def sent(
        self, executor: int, number: int, pending: PendingSubmission, start_time: float, sending: float, nbytes: int
    ) -> None:
        """Record a sent frame, as `Tap.sent`."""
        now, record_of_sender = time.perf_counter(), self.current_record()
        number += self._earlier
        self._last_number = max(self._last_number, number)
        sites, prepared = pending.program.sites, pending.prepared
        self._add(record_of_sender, ("send", "send", start_time, now, None, executor, number))
        if len(self.submissions) >= SUBMISSIONS_LIMIT:
            self.lost += 1
            return
        # Walking the stack is most of a record's cost. The thread that waits for the reply walks it anyway and finds the same line.
        site = sites[-1] if sites else self._places.find(sys._getframe(1), Cause.OTHER)[:2]  # noqa: SLF001 - the public ways build a list of all frames
        count = len(prepared.nodes) if prepared is not None else 0
        program = pending.program if self.ops and count else None
        where = (
            executor,
            number,
            record_of_sender,
            -1,
            start_time,
            sending,
            now,
            nbytes,
            site,
            pending.is_awaited,
            count,
        )
        record = SubmissionRecord(*where, prepared, program)
        self.submissions.append(record)
        record_of_sender.sending_submissions.append(record)
        self._pending[executor, number] = record

    def answered(self, executor: int, number: int, completed: Completed, nbytes: int) -> None:
        """Record a reply, as `Tap.answered`."""
        record = self._pending.pop((executor, number + self._earlier), None)
        if record is None:  # the submission was sent before the block
            return
        record.received, record.fetched = time.perf_counter(), nbytes
        record.timing, record.times, record.failures = completed.timing, completed.times, len(completed.failures)

    def waited(self, cause: Cause, start_time: float, executor: int, number: int) -> None:
        """Record a wait, as `Tap.waited`."""
        if self._asking:
            return
        now, record = time.perf_counter(), self.current_record()
        place = self._places.find(sys._getframe(1), cause)  # noqa: SLF001 - the public ways build a list of all frames
        self._add(record, ("wait", "", start_time, now, place, executor, number and number + self._earlier))

    # --- `Observer` ------------------------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Record connections with their threads, as `Observer.observe`."""
        if self._asking:
            return
        start_time = time.perf_counter() - event.fields["seconds"]
        self._earlier = self._last_number
        self._pending.clear()
        self._asking = True  # requests from here on are not round trips of the program
        try:
            self.connected()
        finally:
            self._asking = False
        name = f"connect to {event.fields['server']}"
        self._add(self.current_record(), ("connect", name, start_time, time.perf_counter(), None, 0, 0))


def _nothing() -> None:
    pass


def check_alone() -> None:
    """Raise if a timeline is being recorded.

    Raises:
        DjinnError: a timeline is being recorded.
    """
    if any(isinstance(tap, Recording) for tap in taps.all):
        raise DjinnError(
            "another djinn.profile() block is active: blocks cannot be nested or run in two threads at a time"
        )
