"""A client thread's time, divided: each moment belongs to the innermost of what the thread was doing, inside the modules that it was in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from djinn_core.ir.module_path import ModuleCall
from djinn_core.runtime.timeline.events import CAPTURE, PYTHON
from djinn_core.runtime.timeline.recorded import Span, ThreadRecord


@attrs.frozen
class Part:
    """Part of a thread's time in which it did one thing.

    Attributes:
        kind, name: as in `TimelineEvent`. begun, ended: its moments. modules: those that it was in, outermost first.
        span: what the part is of, where that is neither Python nor a call on the device.
    """

    kind: str
    name: str
    begun: float
    ended: float
    modules: tuple[str, ...]
    span: Span | None = None

    @property
    def seconds(self) -> float:
        """Seconds that it took."""
        return self.ended - self.begun


@attrs.frozen
class ModuleSpan:
    """A call of a module, from the first op that was recorded in it to the last; `modules`: it and those that it was in."""

    modules: tuple[str, ...]
    begun: float
    ended: float
    ops: int


def module_spans(record: ThreadRecord) -> list[ModuleSpan]:
    """Calls of modules, outer ones before those in them."""
    found: list[ModuleSpan | None] = []
    open_: list[tuple[object, int, float, int]] = []  # key, place among `found`, beginning, ops before
    names: tuple[str, ...] = ()
    ops = _outermost(record)
    ended = 0.0

    def close(depth: int, done: int) -> None:
        while len(open_) > depth:
            _, place, begun, before = open_.pop()
            found[place] = ModuleSpan(names[: len(open_) + 1], begun, ended, done - before)

    changes = [*record.modules, (record.count, None)]
    position, count = -1, len(record.paths)
    for done, op in enumerate(ops):
        begun = record.calls[3 * op]
        moved = False
        while position + 1 < count and changes[position + 1][0] <= op:
            position += 1
            moved = True
        if moved:
            now = record.paths[position]
            keys = _keys(changes[position][1], now)
            same = 0
            while same < min(len(keys), len(open_)) and open_[same][0] == keys[same]:
                same += 1
            close(same, done)
            names = now
            for key in keys[same:]:
                open_.append((key, len(found), begun, done))
                found.append(None)
        ended = record.calls[3 * op + 1]
    close(0, len(ops))
    return [one for one in found if one is not None]


def _keys(call: ModuleCall | None, names: tuple[str, ...]) -> tuple[object, ...]:
    """For each name the call that it is of, so that two calls of a module are told apart; the name where that is not known."""
    links: list[ModuleCall] = []
    while call is not None and not isinstance(call[0], int):
        links.append(call)
        call = call[1]
    return tuple(map(id, reversed(links))) if len(links) == len(names) else names


def _outermost(record: ThreadRecord) -> list[int]:
    """Calls on the device that were not made inside of others, which end, and are noted, after those in them."""
    found: list[int] = []
    calls = record.calls
    for op in range(record.count):
        while found and calls[3 * found[-1]] >= calls[3 * op]:
            found.pop()
        found.append(op)
    return found


def divided(record: ThreadRecord, modules: Sequence[ModuleSpan], begun: float, ended: float) -> list[Part]:
    """The thread's time from `begun` to `ended`, in parts without gaps."""
    inside = sorted(_intervals(record, modules), key=lambda one: (one[0], -one[1], one[2] is not None))
    parts: list[Part] = []
    open_: list[tuple[float, tuple[str, ...], str, str, Span | None]] = [(ended, (), PYTHON, PYTHON, None)]
    now = begun

    def until(moment: float) -> None:
        nonlocal now
        moment = min(moment, ended)
        if moment > now:
            _, names, kind, name, span = open_[-1]
            parts.append(Part(kind, name, now, moment, names, span))
            now = moment

    for start, last, leaf, names in inside:
        while len(open_) > 1 and open_[-1][0] <= start:
            until(open_[-1][0])
            open_.pop()
        until(start)
        _, around, kind, name, span = open_[-1]
        stop = min(last, open_[-1][0])
        if leaf is None:
            open_.append((stop, names, kind, name, span))
        else:
            open_.append((stop, around, *leaf))
    while open_:
        until(open_[-1][0])
        open_.pop()
    return parts


_Interval = tuple[float, float, tuple[str, str, Span | None] | None, tuple[str, ...]]


def _intervals(record: ThreadRecord, modules: Sequence[ModuleSpan]) -> Iterator[_Interval]:
    """Intervals of what the thread did, and of the modules that it was in (those without a kind), in no order."""
    for module in modules:
        yield module.begun, module.ended, None, module.modules
    for op in _outermost(record):
        begun, ended, name = record.calls[3 * op : 3 * op + 3]
        yield begun, ended, (CAPTURE, str(name), None), ()
    for span in record.spans:
        yield span.begun, span.ended, (span.kind, span.name, span), ()
