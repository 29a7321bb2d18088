"""Program fingerprints: cache keys that differ for programs whose plans may differ, computed far faster than a plan.

Values are numbered by first appearance, so that equal programs that were recorded twice look alike. Everything else that a
plugin may look at counts exactly: sizes, scalars, dtypes, what dies.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping

import msgspec

from djinn_core.ir.handles import storages_of
from djinn_core.ir.program import Call, Program

_REMEMBERED = 65536


class Fingerprint(msgspec.Struct, frozen=True):
    """Everything that a program's plan depends on, with its values numbered by first appearance. Valid in this process only.

    Attributes:
        topology: ops, data flow, shared memory and what is dead at the end, without sizes and scalars.
        shapes: sizes and scalars.
        values: the program's values in order of first appearance.
    """

    topology: tuple[object, ...]
    shapes: tuple[object, ...]
    values: tuple[int, ...]


def fingerprint(program: Program) -> Fingerprint:
    """The fingerprint of a program."""
    calls, slots = program.calls, program.slots
    looked = _looked_at(calls)
    numbers: defaultdict[int, int] = defaultdict(itertools.count().__next__)
    flow = tuple(map(numbers.__getitem__, program.operands))
    dead = bytes(map(program.dead.__contains__, numbers))
    marks = tuple(map(looked.marks.__getitem__, calls))
    topology = (marks, flow, _shared(numbers), dead, tuple(map(type, slots)))
    return Fingerprint(topology, (tuple(map(looked.sizes.__getitem__, calls)), repr(slots)), tuple(numbers))


def _shared(values: Mapping[int, int]) -> tuple[int, ...]:
    """Storage number of each value, by first appearance; empty where no values share memory."""
    storages = storages_of(values)
    if len({*storages}) == len(storages):
        return ()
    numbers: defaultdict[int, int] = defaultdict(itertools.count().__next__)
    return tuple(map(numbers.__getitem__, storages))


class _LookedAt(msgspec.Struct):
    """The parts of calls that a fingerprint contains, as numbers: form and classes, and sizes."""

    marks: dict[Call, int] = msgspec.field(default_factory=dict)
    sizes: dict[Call, int] = msgspec.field(default_factory=dict)
    numbered: dict[object, int] = msgspec.field(default_factory=dict)
    numbers: Iterator[int] = msgspec.field(
        default_factory=itertools.count
    )  # never gives two threads the same, nor one twice

    def number(self, key: object) -> int:
        return self.numbered.setdefault(key, next(self.numbers))

    def look(self, call: Call) -> None:
        metas = [*call.operands, *[m for m in call.results if m is not None]]
        kinds = tuple((m.dtype, len(m.shape), m.device, m.conj, m.neg) for m in metas)
        marks = self.number((call.signature.id, kinds, call.random, call.inplace, call.aliases))
        sizes = self.number(("sizes", tuple((m.shape, m.stride, m.offset) for m in metas)))
        self.sizes[call] = sizes
        self.marks[call] = marks  # last: other threads take a call that is here for known


_latest = _LookedAt()


def _looked_at(calls: tuple[Call, ...]) -> _LookedAt:
    """A table with all of these calls. A full one is replaced, not emptied: other threads may be reading it."""
    global _latest
    table = _latest
    if len(table.marks) > _REMEMBERED:
        table = _latest = _LookedAt(numbers=table.numbers)  # no number stands for two things
    for call in {*calls} - table.marks.keys():
        table.look(call)
    return table
