"""Conversion of raw records into the events of a timeline. It runs once, after the block has ended."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from djinn_profiler.timeline.events import (
    ANSWER,
    CAPTURE,
    CLIENT,
    DECODE,
    EARLIER,
    ENCODE,
    EXECUTE,
    LINKS,
    MEMORY,
    MODULE,
    OP,
    PYTHON,
    QUEUE,
    RANGE,
    RECOVERY,
    REQUEST,
    TRANSFER,
    UNANSWERED,
    WAIT,
    TimelineEvent,
)
from djinn_profiler.timeline.recorded import Range, Span, SubmissionRecord, ThreadRecord
from djinn_profiler.timeline.recording import Recording
from djinn_profiler.timeline.submissions import OpRun, Phases, op_runs, parts_of_wait, phases_of
from djinn_profiler.timeline.threads import Part, divide, module_spans

PARTS_SHOWN: Final = 100_000  # parts of Python and device calls; above this number, a module call's are merged

RANGES_SEEN: Final = 256  # transfers that begin before the end of a submission, to inspect for it


@attrs.frozen
class WaitParts:
    """A wait, and its consecutive parts.

    Attributes:
        span: the wait.
        modules: path of the module in which it occurred, outermost first.
        parts: kind, start and end of each part.
    """

    span: Span
    modules: tuple[str, ...]
    parts: tuple[tuple[str, float, float], ...]


@attrs.frozen
class ThreadTime:
    """A thread's time: its parts, and its waits."""

    record: ThreadRecord
    parts: tuple[Part, ...]
    waits: tuple[WaitParts, ...]


@attrs.frozen
class AssembledTimeline:
    """A timeline as events.

    Attributes:
        events: ordered by start.
        threads: time of each thread.
        phases: phases of all submissions.
        runs: runs of their instructions, if timed.
    """

    events: tuple[TimelineEvent, ...]
    threads: tuple[ThreadTime, ...]
    phases: tuple[Phases, ...]
    runs: tuple[OpRun, ...]


def executor_name(number: int) -> str:
    """Return the display name of executor `number`. 0 means the only executor."""
    return f"executor {number}" if number else "executor"


def assemble(recording: Recording) -> AssembledTimeline:
    """Return the events of a recording."""
    for thread in recording.threads:
        thread.merge_times()
    by_executor: dict[int, list[SubmissionRecord]] = defaultdict(list)
    for record in recording.submissions:
        by_executor[record.executor].append(record)
    waits: dict[int, list[Span]] = defaultdict(list)
    for span in (span for thread in recording.threads for span in thread.spans if span.kind == WAIT):
        waits[span.executor].append(span)
    phases = {e: phases_of(records, recording.clocks, waits[e]) for e, records in sorted(by_executor.items())}
    incoming = {e: _incoming(phases_of_executor, recording) for e, phases_of_executor in phases.items()}
    builder = _Builder(recording)
    threads = tuple([_thread_time(recording, record, phases, incoming) for record in recording.threads])
    for thread_time in threads:
        builder.add_thread(thread_time)
    runs: list[OpRun] = []
    for executor, phases_of_executor in phases.items():
        runs += builder.add_executor(executor, phases_of_executor)
    events = tuple(sorted(builder.events, key=lambda event: (event.start, -event.seconds)))
    return AssembledTimeline(
        events,
        threads,
        tuple([submission for phases_of_executor in phases.values() for submission in phases_of_executor]),
        tuple(runs),
    )


def _incoming(phases: Sequence[Phases], recording: Recording) -> list[tuple[float, float]]:
    """Return the intervals in which an executor waited for values of other executors, ordered and disjoint."""
    intervals: list[tuple[float, float]] = []
    for begun, ended in sorted(
        (begun, ended) for begun, ended, transfer in _transfers(phases, recording) if transfer.incoming
    ):
        if intervals and begun <= intervals[-1][1]:
            intervals[-1] = intervals[-1][0], max(intervals[-1][1], ended)
        else:
            intervals.append((begun, ended))
    return intervals


def _transfers(phases: Sequence[Phases], recording: Recording) -> Iterator[tuple[float, float, Any]]:
    """Yield the transfers of an executor, by the client's clock."""
    for submission in phases:
        times = submission.record.times
        clock = recording.clocks.get((submission.record.executor, times.instance)) if times is not None else None
        if times is not None and clock is not None:
            for transfer in times.transfers:
                yield clock.at_client(transfer.begun), clock.at_client(transfer.ended), transfer


def _thread_time(
    recording: Recording,
    record: ThreadRecord,
    phases: Mapping[int, Sequence[Phases]],
    incoming: Mapping[int, Sequence[tuple[float, float]]],
) -> ThreadTime:
    begun, ended = recording.begun, recording.ended
    if record is not recording.thread:  # from the first to the last sighting
        moments = [
            *record.calls[:1],
            *record.calls[-2:-1],
            *(m for span in record.spans for m in (span.begun, span.ended)),
        ]
        begun = max(begun, min(moments, default=ended))
        ended = min(ended, max(moments, default=ended))
    parts = divide(record, module_spans(record, recording.ended), begun, ended)
    by_number = {
        (e, submission.record.number): submission
        for e, phases_of_executor in phases.items()
        for submission in phases_of_executor
    }
    waits = []
    for part in parts:
        if part.kind == WAIT and part.span is not None:
            span = attrs.evolve(part.span, begun=part.begun, ended=part.ended)
            of = by_number.get((span.executor, span.number))
            waits.append(WaitParts(span, part.modules, tuple(parts_of_wait(span, of, incoming.get(span.executor, ())))))
    return ThreadTime(record, tuple(parts), tuple(waits))


class _Builder:
    """Create events, with times relative to the start of the block."""

    def __init__(self, recording: Recording) -> None:
        self.events: list[TimelineEvent] = []
        self._recording = recording
        self._origin = recording.begun
        self._lines: dict[int, str] = {}

    def _add(
        self, kind: str, name: str, process: str, lane: str, start_time: float, end_time: float, **facts: Any
    ) -> None:
        seconds = max(0.0, end_time - start_time)
        self.events.append(TimelineEvent(kind, name, process, lane, start_time - self._origin, seconds, **facts))

    # --- the client ------------------------------------------------------------------------------------------------

    def add_thread(self, time: ThreadTime) -> None:
        """Add the lanes of a thread."""
        record = time.record
        namesakes = [thread for thread in self._recording.threads if thread.name == record.name]
        name = record.name if len(namesakes) == 1 else f"{record.name} ({record.number})"
        for module in module_spans(record, self._recording.ended):
            facts = {"path": " / ".join(module.modules), "ops": module.ops}
            self._add(MODULE, module.modules[-1], CLIENT, f"{name}: modules", module.begun, module.ended, args=facts)
        for range_ in sorted(record.ranges, key=lambda range_: (range_.begun, -range_.ended)):
            facts = {"instructions": range_.stop - range_.first}
            self._add(RANGE, range_.name, CLIENT, f"{name}: ranges", range_.begun, range_.ended, args=facts)
        parts = time.parts if len(time.parts) <= PARTS_SHOWN else list(_merge_short_parts(time.parts))
        for part in parts:
            self._add_part(name, part)
        for wait in time.waits:
            self._add_wait(name, wait)

    def _add_part(self, thread: str, part: Part) -> None:
        if part.kind == WAIT:
            return
        facts: dict[str, Any] = {"args": {"module": " / ".join(part.modules)} if part.modules else {}}
        if part.span is not None:
            facts |= {"executor": part.span.executor, "submission": part.span.number, "line": str(part.span.line)}
        self._add(part.kind, part.name, CLIENT, f"{thread}: {part.kind}", part.begun, part.ended, **facts)

    def _add_wait(self, thread: str, wait: WaitParts) -> None:
        span = wait.span
        of = {"executor": span.executor, "submission": span.number, "line": str(span.line)}
        facts: dict[str, Any] = {"module": " / ".join(wait.modules)} if wait.modules else {}
        self._add(WAIT, span.cause, CLIENT, f"{thread}: {WAIT}", span.begun, span.ended, args=facts, **of)
        for kind, begun, ended in wait.parts:
            self._add(f"{WAIT}: {kind}", kind, CLIENT, f"{thread}: {WAIT}", begun, ended, **of)

    # --- an executor and the way to it ---------------------------------------------------------------------------------

    def add_executor(self, number: int, phases: Sequence[Phases]) -> list[OpRun]:
        """Add the lanes of an executor and of its link, and the runs of its instructions."""
        name, rows = executor_name(number), []
        lanes = _Lanes()
        for submission in phases:
            self._add_transfers_on_link(name, submission, lanes)
            self._add_phases(name, submission, lanes)
            runs = list(op_runs(submission, self._recording.names_of_calls, self._lines))
            for run in runs:
                run_facts = {"module": " / ".join(run.modules)} if run.modules else {}
                ended = run.begun + run.seconds
                of = {"executor": number, "submission": submission.record.number, "line": run.line}
                self._add(OP, run.op, name, "instructions", run.begun, ended, args=run_facts, **of)
            self._add_ranges(name, submission, runs)
            rows += runs
        for begun, ended, transfer in _transfers(phases, self._recording):
            peer, facts = executor_name(transfer.peer), {"bytes": transfer.nbytes, "transfer": transfer.transfer}
            lane, label = ("transfers in", f"from {peer}") if transfer.incoming else ("transfers out", f"to {peer}")
            lane = lanes.reserve(lane, begun, ended)
            self._add(TRANSFER, label, name, lane, begun, ended, executor=number, args=facts)
        self._add_counters(name, phases)
        self._add_replacements(name, phases)
        return rows

    def _add_transfers_on_link(self, name: str, submission: Phases, lanes: _Lanes) -> None:
        record = submission.record
        of = {"executor": record.executor, "submission": record.number, "line": str(record.line)}
        lane = lanes.reserve(f"to {name}", submission.sent, submission.arrived)
        self._add(
            REQUEST,
            f"request {record.number}",
            LINKS,
            lane,
            submission.sent,
            submission.arrived,
            args={"bytes": record.nbytes},
            **of,
        )
        lane = lanes.reserve(f"from {name}", submission.done, submission.returned)
        self._add(
            ANSWER,
            f"answer {record.number}",
            LINKS,
            lane,
            submission.done,
            submission.returned,
            args={"bytes": record.fetched},
            **of,
        )

    def _add_phases(self, name: str, submission: Phases, lanes: _Lanes) -> None:
        record = submission.record
        of = {"executor": record.executor, "submission": record.number, "line": str(record.line)}
        plan = record.prepared
        facts: dict[str, Any] = {"instructions": record.instructions, "measured": submission.measured}
        if plan is not None and plan.predicted_seconds is not None:
            facts["predicted_seconds"] = plan.predicted_seconds
        if record.failures:
            facts["failures"] = record.failures
        if ranges := _ranges_of(record):
            facts["ranges"] = ", ".join(range_.name for range_ in ranges)
        kinds = {
            RECOVERY: "queue",
            EARLIER: "queue",
            QUEUE: "queue",
            DECODE: "decode",
            EXECUTE: "execute",
            ENCODE: "encode",
        }
        for kind, begun, ended in submission.parts():
            if kind in kinds and (ended > begun or kind == EXECUTE):
                lane = lanes.reserve(kinds[kind], begun, ended)
                label = f"{kind} {record.number}"
                self._add(kind, label, name, lane, begun, ended, args=facts if kind == EXECUTE else {}, **of)

    def _add_ranges(self, name: str, submission: Phases, runs: Sequence[OpRun]) -> None:
        """Add the program's ranges on the executor.

        A range lasts from its first to its last instruction on the executor.
        """
        record = submission.record
        for range_ in _ranges_of(record):
            inside = [run for run in runs if range_.first <= record.first + run.node < range_.stop]
            if inside:
                begun, ended = min(run.begun for run in inside), max(run.begun + run.seconds for run in inside)
                of = {"executor": record.executor, "submission": record.number}
                self._add(RANGE, range_.name, name, "ranges", begun, ended, args={"instructions": len(inside)}, **of)

    def _add_counters(self, name: str, phases: Sequence[Phases]) -> None:
        for submission in phases:
            if submission.record.times is not None:
                self._add(
                    MEMORY,
                    "memory",
                    name,
                    "memory",
                    submission.done,
                    submission.done,
                    args={"bytes": submission.record.times.memory},
                )
        changes = sorted(
            [(submission.sent, 1) for submission in phases] + [(submission.read, -1) for submission in phases]
        )
        for (moment, _), count in zip(changes, itertools.accumulate(c for _, c in changes), strict=True):
            self._add(UNANSWERED, "unanswered", name, "unanswered", moment, moment, args={"submissions": count})

    def _add_replacements(self, name: str, phases: Sequence[Phases]) -> None:
        """Add an event for each recovery: a submission that ran in another process than the submission before."""
        timed = [submission for submission in phases if submission.record.times is not None]
        for before, submission in itertools.pairwise(timed):
            if before.record.times.instance != submission.record.times.instance:  # type: ignore[union-attr] # as told
                self._add("replaced", "another process took over", name, "execute", before.done, submission.taken)


def _ranges_of(record: SubmissionRecord) -> list[Range]:
    """Return the ranges in which instructions of a submission were recorded."""
    if record.first < 0 or record.prepared is None or not record.thread.ranges:
        return []
    stop, ranges = record.first + max(record.prepared.nodes, default=-1) + 1, record.thread.ranges
    last = bisect_left(ranges, stop, key=lambda range_: range_.first)
    return [range_ for range_ in ranges[max(0, last - RANGES_SEEN) : last] if record.first < range_.stop]


class _Lanes:
    def __init__(self) -> None:
        self._ends: dict[str, list[float]] = defaultdict(list)

    def reserve(self, name: str, begun: float, ended: float) -> str:
        """Reserve a lane of this name from `begun` until `ended`, and return the lane's name."""
        ends = self._ends[name]
        for position, end in enumerate(ends):
            if end <= begun:
                ends[position] = ended
                return name if position == 0 else f"{name} ({position + 1})"
        ends.append(ended)
        return name if len(ends) == 1 else f"{name} ({len(ends)})"


def _merge_short_parts(parts: Iterable[Part]) -> Iterator[Part]:
    """Merge consecutive parts of a module: one part for its Python code, and one for its device calls.

    The sums of seconds stay equal.
    """
    small = {PYTHON, CAPTURE}
    for key, group in itertools.groupby(parts, lambda part: (part.kind in small, part.modules)):
        members = list(group)
        if not key[0] or len(members) <= 2:
            yield from members
            continue
        calls = [part for part in members if part.kind == CAPTURE]
        calls_end = members[0].begun + sum(part.seconds for part in calls)
        yield Part(CAPTURE, f"{len(calls)} calls", members[0].begun, calls_end, key[1])
        yield Part(PYTHON, PYTHON, calls_end, members[-1].ended, key[1])
