"""Trace files: a timeline in the Trace Event Format, which Perfetto and chrome://tracing read.

The format: "Trace Event Format", Google, 2016. Complete events (`X`) of a lane are disjoint or nested. Flow events
(`s`, `t`, `f`) bind to the enclosing slice. Counters are `C`. Names of processes and lanes are metadata (`M`). Times
are in microseconds.
"""

from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from djinn_profiler.timeline.events import (
    ANSWER,
    CLIENT,
    EXECUTE,
    LINKS,
    MEMORY,
    REQUEST,
    SEND,
    UNANSWERED,
    WAIT,
    TimelineEvent,
)

_COUNTERS: Final = {MEMORY: "bytes", UNANSWERED: "submissions"}
_LANES: Final = ("modules", "ranges", "python", "capture", "plan", "send", "upload", "connect", "wait")
_CHAIN: Final = (SEND, REQUEST, EXECUTE, ANSWER, WAIT)  # events of a submission, in the order of its flow


def trace_of(events: Sequence[TimelineEvent], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trace as a JSON value. `facts`: metadata of the whole trace."""
    processes = _number(event.process for event in sorted(events, key=lambda one: _rank(one.process)))
    lanes = _number((event.process, event.lane) for event in sorted(events, key=lambda one: _lane_rank(one.lane)))
    trace: list[dict[str, Any]] = []
    for process, number in processes.items():
        trace.append(_metadata_event("process_name", number, 0, process))
        trace.append({"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}})
    counters = {(event.process, event.lane) for event in events if event.kind in _COUNTERS}
    for (process, lane), number in lanes.items():
        if (process, lane) not in counters:
            trace.append(_metadata_event("thread_name", processes[process], number, lane))
            order = {"sort_index": number}
            trace.append(
                {"ph": "M", "name": "thread_sort_index", "pid": processes[process], "tid": number, "args": order}
            )
    chains: dict[tuple[int, int], dict[str, TimelineEvent]] = defaultdict(dict)
    for event in events:
        place = processes[event.process], lanes[event.process, event.lane]
        trace.append(_event(event, *place))
        if event.submission and event.kind in _CHAIN and _nanoseconds(event)[1]:
            chains[event.executor, event.submission].setdefault(event.kind, event)
    for identity, chain in enumerate(chains.values(), 1):
        trace += _flow(identity, chain, processes, lanes)
    return {"traceEvents": trace, "displayTimeUnit": "ms", "otherData": dict(facts)}


def save_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a trace, compressed if the name ends in `.gz`. Creates a missing folder.

    Raises:
        OSError: the file cannot be written.
    """
    data = msgspec.json.encode(trace)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def _number(keys: Iterable[Any]) -> dict[Any, int]:
    return {key: number for number, key in enumerate(dict.fromkeys(keys), 1)}


def _rank(process: str) -> tuple[int, str]:
    return (0 if process == CLIENT else 1 if process == LINKS else 2), process


def _lane_rank(lane: str) -> tuple[str, int, str]:
    thread, _, kind = lane.rpartition(": ")
    return thread, _LANES.index(kind) if kind in _LANES else len(_LANES), lane


def _metadata_event(what: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": lane, "args": {"name": name}}


def _nanoseconds(event: TimelineEvent) -> tuple[int, int]:
    """Return start and length of an event in nanoseconds. Starts and ends are rounded alike, so neighbours do not overlap."""
    begun = round(event.start * 1e9)
    return begun, round(event.end * 1e9) - begun


def _event(event: TimelineEvent, process: int, lane: int) -> dict[str, Any]:
    begun, length = _nanoseconds(event)
    if event.kind in _COUNTERS:
        value = {_COUNTERS[event.kind]: event.args[_COUNTERS[event.kind]]}
        return {"ph": "C", "name": event.name, "pid": process, "ts": begun / 1e3, "args": value}
    facts = dict(event.args)
    if event.line:
        facts["line"] = event.line
    if event.submission:
        facts |= {"submission": event.submission, "executor": event.executor}
    where = {"pid": process, "tid": lane, "ts": begun / 1e3, "dur": length / 1e3}
    return {"ph": "X", "name": event.name or event.kind, "cat": event.kind, **where, "args": facts}


def _flow(
    identity: int,
    chain: Mapping[str, TimelineEvent],
    processes: Mapping[str, int],
    lanes: Mapping[tuple[str, str], int],
) -> Iterator[dict[str, Any]]:
    """Yield arrows from the line that sent a submission to its run, and from the run to the line that waited."""
    links = [chain[kind] for kind in _CHAIN if kind in chain]
    if len(links) < 2:
        return
    for event in links:
        begun, length = _nanoseconds(event)
        last = event is links[-1]
        # A reply ends the wait for it, which may have begun long before the reply arrived.
        moment = begun + max(0, length - 1) if last and event.kind == WAIT else begun
        phase = {"ph": "s"} if event is links[0] else {"ph": "f", "bp": "e"} if last else {"ph": "t"}
        place = {"pid": processes[event.process], "tid": lanes[event.process, event.lane], "ts": moment / 1e3}
        yield {**phase, "name": "submission", "cat": "submission", "id": identity, **place}
