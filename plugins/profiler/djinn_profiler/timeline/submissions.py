"""Phases of each submission: request, executor and reply, by the client's clock."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from djinn_core.ir.program import describe_site
from djinn_core.wire.timing_messages import ExecutionTimes
from djinn_profiler.timeline.clocks import ClientClock
from djinn_profiler.timeline.events import (
    ANSWER,
    DECODE,
    EARLIER,
    ENCODE,
    EXECUTE,
    QUEUE,
    READ,
    RECOVERY,
    REQUEST,
    TRANSFER,
)
from djinn_profiler.timeline.recorded import Span, SubmissionRecord

IDLE: Final = 1e-4  # seconds between two steps of an executor; after a longer gap it was idle
_PAIR: Final = struct.Struct("<ff")


@attrs.frozen
class Phases:
    """Times of a submission's phases by the client's clock, in order.

    Attributes:
        record: the submission.
        recovered: True if it was the first to run on a new process.
        measured: True if the executor reported times. Otherwise its durations are put in the middle of the round trip.
        sent: sending of its frame began.
        arrived: the frame arrived at the executor.
        taken: the session began to handle the frame.
        ready: it began to wait for the device.
        begun: the device began it.
        executed: its last instruction had run.
        done: its results were ready.
        returned: the reply arrived at the client.
        read: the client had read the reply.
    """

    record: SubmissionRecord
    recovered: bool
    measured: bool
    sent: float
    arrived: float
    taken: float
    ready: float
    begun: float
    executed: float
    done: float
    returned: float
    read: float

    def parts(self) -> Iterator[tuple[str, float, float]]:
        """Yield kind, start and end of each phase, in order."""
        kinds = RECOVERY if self.recovered else REQUEST, EARLIER, DECODE, QUEUE, EXECUTE, ENCODE, ANSWER, READ
        bounds = (self.sent, self.arrived, self.taken, self.ready, self.begun, self.executed, self.done, self.returned)
        yield from zip(kinds, bounds, (*bounds[1:], self.read), strict=True)


@attrs.frozen
class OpRun:
    """A run of an instruction on an executor, by the client's clock."""

    op: str
    begun: float
    seconds: float
    node: int  # index of the instruction's node in the program
    line: str
    modules: tuple[str, ...]


def phases_of(
    records: Sequence[SubmissionRecord], clocks: Mapping[tuple[int, str], ClientClock], waits: Sequence[Span]
) -> list[Phases]:
    """Return the phases of one executor's answered submissions, in sending order."""
    awaited = {span.number for span in waits}
    phases: list[Phases] = []
    before, process = 0.0, ""  # end of the executor's previous work
    for record in records:
        if not record.received:
            continue
        times = record.times
        clock = clocks.get((record.executor, times.instance)) if times is not None else None
        if times is None or clock is None:
            phases.append(_assumed(record))
        else:
            transfers = [clock.at_client(transfer.ended) for transfer in times.transfers]
            recovered = bool(process) and process != times.instance
            process = times.instance
            phases.append(_phases_of(record, times, clock, max(before, *transfers, 0.0), awaited, recovered))
        before = phases[-1].done
    return phases


def _phases_of(
    record: SubmissionRecord,
    times: ExecutionTimes,
    clock: ClientClock,
    before: float,
    awaited: set[int],
    recovered: bool,
) -> Phases:
    moments = [clock.at_client(m) for m in (times.taken, times.ready, times.begun, times.executed, times.done)]
    # Clock error is at most the difference of the one-way times; no frame arrives before it is sent.
    taken, ready, begun, executed, done = [min(max(m, record.sending), record.received) for m in moments]
    # An idle executor takes a frame on arrival. A frame that came while it was busy has been waiting since an unknown moment.
    idle = recovered or taken > before + IDLE
    arrived = taken if idle else min(taken, record.sent + clock.one_way)
    # A waiting thread reads a reply on arrival; other replies wait until a thread reads them.
    returned = record.received if record.number in awaited else min(record.received, done + clock.one_way)
    way = record.sending, arrived, taken, ready, begun, executed, done, returned
    return Phases(record, recovered, True, *way, record.received)


def _assumed(record: SubmissionRecord) -> Phases:
    """Return phases with the durations from an executor's reply, placed in the middle of the round trip."""
    timing, whole = record.timing, record.received - record.sending
    executor_seconds = timing.decode + timing.queue + timing.execute + timing.encode
    shrink = min(1.0, whole / executor_seconds) if executor_seconds else 1.0
    taken = record.sending + max(0.0, whole - executor_seconds) / 2
    bounds = [taken]
    for seconds in (timing.decode, timing.queue, timing.execute, timing.encode):
        bounds.append(bounds[-1] + seconds * shrink)
    taken, ready, begun, executed, done = bounds
    read = record.received
    return Phases(record, False, False, record.sending, taken, taken, ready, begun, executed, done, read, read)


def parts_of_wait(
    wait: Span, phases: Phases | None, incoming: Sequence[tuple[float, float]]
) -> list[tuple[str, float, float]]:
    """Return kind, start and end of each part of a wait. The parts are consecutive and without gaps.

    `incoming`: ordered, disjoint intervals in which the executor waited for values of other executors.
    """
    if phases is None:  # a request that the executor answers after all earlier work
        return [(REQUEST, wait.begun, wait.ended)]
    parts: list[tuple[str, float, float]] = []
    for kind, first, last in phases.parts():
        begun, ended = max(first, wait.begun), wait.ended if kind == READ else min(last, wait.ended)
        if ended > begun:
            parts += _split(begun, ended, incoming) if kind == EARLIER else [(kind, begun, ended)]
    return parts or [(READ, wait.begun, wait.ended)]


def _split(
    start_time: float, end_time: float, incoming: Sequence[tuple[float, float]]
) -> list[tuple[str, float, float]]:
    """Return an interval of earlier work on the executor, split into computing and transfers from other executors."""
    parts: list[tuple[str, float, float]] = []
    position = bisect_right(
        incoming, start_time, key=lambda interval: interval[1]
    )  # binary search, because a pool may have as many transfers as ops
    for first, last in incoming[position : bisect_left(incoming, end_time, position, key=lambda interval: interval[0])]:
        start, stop = max(first, start_time), min(last, end_time)
        if stop > start:
            parts += [(EARLIER, start_time, start)] if start > start_time else []
            parts.append((TRANSFER, start, stop))
            start_time = stop
    return [*parts, (EARLIER, start_time, end_time)] if end_time > start_time else parts


def op_runs(phases: Phases, modules: Mapping[int, tuple[str, ...]], lines: dict[int, str]) -> Iterator[OpRun]:
    """Yield the timed runs of a submission's instructions.

    `modules`: names by identity of a call. `lines`: known lines, by identity of a site.
    """
    record, times = phases.record, phases.record.times
    prepared, program = record.prepared, record.program
    if times is None or prepared is None or program is None or not times.ops:
        return
    whole = len(times.ops) // _PAIR.size * _PAIR.size
    for index, (after, seconds) in enumerate(_PAIR.iter_unpack(times.ops[:whole])):
        if seconds < 0 or index >= len(prepared.nodes):
            continue
        node, line = prepared.nodes[index], ""
        names: tuple[str, ...] = ()
        if 0 <= node < len(program.sites):
            site = program.sites[node]
            line = lines.get(id(site)) or lines.setdefault(id(site), describe_site(site))
            names = modules.get(id(program.modules[node]), ())
        yield OpRun(prepared.call(index, program).op, phases.begun + after, seconds, node, line, names)
