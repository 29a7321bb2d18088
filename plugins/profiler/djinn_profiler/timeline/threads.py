"""Division of a client thread's time: each moment belongs to the innermost activity, and to the modules that enclose it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import attrs

from djinn_profiler.timeline.events import CAPTURE, PYTHON
from djinn_profiler.timeline.recorded import Span, ThreadRecord


@attrs.frozen
class Part:
    """Part of a thread's time with a single activity.

    Attributes:
        kind: as in `TimelineEvent`.
        name: as in `TimelineEvent`.
        begun: start of the part.
        ended: end of the part.
        modules: the modules that enclose it, outermost first.
        span: its span; None for Python code and for calls on the device.
    """

    kind: str
    name: str
    begun: float
    ended: float
    modules: tuple[str, ...]
    span: Span | None = None

    @property
    def seconds(self) -> float:
        """Return its length in seconds."""
        return self.ended - self.begun


@attrs.frozen
class ModuleSpan:
    """A call of a module, or a part of a backward pass.

    Attributes:
        modules: its module path.
        ops: number of calls on the device in it.
    """

    modules: tuple[str, ...]
    begun: float
    ended: float
    ops: int


def module_spans(record: ThreadRecord, end_time: float) -> list[ModuleSpan]:
    """Return the calls of modules, outer calls first. Calls that have not returned end at `end_time`."""
    spans: list[ModuleSpan | None] = []
    open_: list[tuple[object, int, float, tuple[str, ...]]] = []  # key, index in `found`, start, names
    begins = [record.calls[3 * op] for op in _outermost(record)]

    def close(depth: int, moment: float) -> None:
        while len(open_) > depth:
            _, place, start_time, names = open_.pop()
            spans[place] = ModuleSpan(
                names, start_time, moment, bisect_left(begins, moment) - bisect_left(begins, start_time)
            )

    for moment, keys, names in record.changes:
        common = 0
        while common < min(len(keys), len(open_)) and open_[common][0] == keys[common]:
            common += 1
        close(common, moment)
        for depth in range(common, len(keys)):
            open_.append((keys[depth], len(spans), moment, names[: depth + 1]))
            spans.append(None)
    close(0, end_time)
    return [name for name in spans if name is not None]


def _outermost(record: ThreadRecord) -> list[int]:
    """Return the positions of device calls that are not nested. Inner calls end, and are recorded, before outer calls."""
    outermost: list[int] = []
    calls = record.calls
    for op in range(record.count):
        while outermost and calls[3 * outermost[-1]] >= calls[3 * op]:
            outermost.pop()
        outermost.append(op)
    return outermost


def divide(record: ThreadRecord, modules: Sequence[ModuleSpan], start_time: float, end_time: float) -> list[Part]:
    """Return the thread's time from `start_time` to `end_time`, in parts without gaps."""
    inside = sorted(_intervals(record, modules), key=lambda one: (one[0], -one[1], one[2] is not None))
    parts: list[Part] = []
    open_: list[tuple[float, tuple[str, ...], str, str, Span | None]] = [(end_time, (), PYTHON, PYTHON, None)]
    now = start_time

    def until(moment: float) -> None:
        nonlocal now
        moment = min(moment, end_time)
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
    """Yield unordered intervals of the thread's activities, and of its modules (without a kind)."""
    for module in modules:
        yield module.begun, module.ended, None, module.modules
    for op in _outermost(record):
        start_time, end_time, name = record.calls[3 * op : 3 * op + 3]
        yield start_time, end_time, (CAPTURE, str(name), None), ()
    for span in record.spans:
        yield span.begun, span.ended, (span.kind, span.name, span), ()
