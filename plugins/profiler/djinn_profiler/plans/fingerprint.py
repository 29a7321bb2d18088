"""Program fingerprints: cache keys that differ for programs whose plans may differ, computed far faster than a plan.

Values are numbered by first appearance, so two recordings of one program have equal fingerprints. All other facts that
a plugin may read are part of the fingerprint: sizes, scalars, dtypes, and dead values.
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
    """All facts that a program's plan depends on, with values numbered by first appearance. Valid in this process only.

    Attributes:
        topology: ops, data flow, shared memory and dead values, without sizes and scalars.
        shapes: sizes and scalars.
        values: the program's values in order of first appearance.
    """

    topology: tuple[object, ...]
    shapes: tuple[object, ...]
    values: tuple[int, ...]


def fingerprint(program: Program) -> Fingerprint:
    """Return the fingerprint of a program."""
    calls, slots = program.calls, program.slots
    looked = _numbers_of(calls)
    numbers: defaultdict[int, int] = defaultdict(itertools.count().__next__)
    flow = tuple(map(numbers.__getitem__, program.operands))
    dead = bytes(map(program.dead.__contains__, numbers))
    marks = tuple(map(looked.marks.__getitem__, calls))
    topology = (marks, flow, _shared(numbers), dead, tuple(map(type, slots)))
    return Fingerprint(topology, (tuple(map(looked.sizes.__getitem__, calls)), repr(slots)), tuple(numbers))


def _shared(values: Mapping[int, int]) -> tuple[int, ...]:
    """Return the number of each value's storage, by first appearance, or () if no values share memory."""
    storages = storages_of(values)
    if len({*storages}) == len(storages):
        return ()
    numbers: defaultdict[int, int] = defaultdict(itertools.count().__next__)
    return tuple(map(numbers.__getitem__, storages))


class _CallNumbers(msgspec.Struct):
    """Numbers that stand for calls in fingerprints: `sizes` for shapes, strides and offsets, `marks` for all else."""

    marks: dict[Call, int] = msgspec.field(default_factory=dict)
    sizes: dict[Call, int] = msgspec.field(default_factory=dict)
    numbered: dict[object, int] = msgspec.field(default_factory=dict)
    numbers: Iterator[int] = msgspec.field(default_factory=itertools.count)  # unique over threads and time

    def number(self, key: object) -> int:
        return self.numbered.setdefault(key, next(self.numbers))

    def look(self, call: Call) -> None:
        metas = [*call.operands, *[m for m in call.results if m is not None]]
        kinds = tuple((m.dtype, len(m.shape), m.device, m.conj, m.neg) for m in metas)
        marks = self.number((call.signature.id, kinds, call.random, call.inplace, call.aliases))
        sizes = self.number(("sizes", tuple((m.shape, m.stride, m.offset) for m in metas)))
        self.sizes[call] = sizes
        self.marks[call] = marks  # last: other threads treat a call in this table as complete


_latest = _CallNumbers()


def _numbers_of(calls: tuple[Call, ...]) -> _CallNumbers:
    """Return a table of numbers that contains all of these calls.

    A full table is replaced, not cleared, because other threads may be reading it.
    """
    global _latest
    table = _latest
    if len(table.marks) > _REMEMBERED:
        table = _latest = _CallNumbers(numbers=table.numbers)  # each number has one meaning
    for call in {*calls} - table.marks.keys():
        table.look(call)
    return table
