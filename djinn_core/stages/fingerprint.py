"""Program fingerprints: cache keys that differ for programs whose plans may differ, computed far faster than a plan.

Values are numbered by first appearance, so that the next step of a loop looks like the last. Everything else that a plugin
may look at counts exactly: sizes, scalars, dtypes, what dies. A plugin whose results are equal for sizes and numbers of one
class sets its attribute `tolerates_growth`. Where all plugins do, sizes and whole numbers from 8 count by class only (8 to
127, 128 to 2047, and so on), except for the sizes of weights; of numbers that are not small and whole only the sign counts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping

import attrs

from djinn_core.ir.op_families import CONVOLUTION, EMBEDDING, NORMALISATION
from djinn_core.ir.program import Call, Program, Slot
from djinn_core.ir.values import storages_of

_EXACT_BELOW = 8
_BITS = 4  # of a size, by which classes differ
_REMEMBERED = 65536
_WEIGHED = CONVOLUTION | NORMALISATION | {"linear"}  # the first operand is data, the others are weights
_MATRIX = 2


@attrs.frozen
class Fingerprint:
    """Everything that a program's plan depends on, with its values numbered by first appearance. Valid in this process only.

    Attributes:
        topology: ops, data flow, shared memory and what is dead at the end, without sizes and numbers.
        shapes: sizes and numbers, exact or by class.
        values: the program's values in order of first appearance.
    """

    topology: tuple[object, ...]
    shapes: tuple[object, ...]
    values: tuple[int, ...]


def fingerprint(program: Program, exact: bool = True) -> Fingerprint:
    """The fingerprint of a program; with `exact` unset, sizes and numbers count by class only."""
    calls, slots = program.calls, program.slots
    looked = _looked_at(calls)
    numbers: defaultdict[int, int] = defaultdict(itertools.count().__next__)
    flow = tuple(map(numbers.__getitem__, program.operands))
    dead = bytes(map(program.dead.__contains__, numbers))
    marks = tuple(map(looked.marks.__getitem__, calls))
    topology = (marks, flow, _shared(numbers), dead, tuple(map(type, slots)))
    if exact:
        return Fingerprint(topology, (tuple(map(looked.sizes.__getitem__, calls)), repr(slots)), tuple(numbers))
    return Fingerprint(topology, (tuple(map(looked.rough.__getitem__, calls)), classes_of(slots)), tuple(numbers))


def _shared(values: Mapping[int, int]) -> tuple[int, ...]:
    """Storage number of each value, by first appearance; empty where no values share memory."""
    storages = storages_of(values)
    if len({*storages}) == len(storages):
        return ()
    numbers: defaultdict[int, int] = defaultdict(itertools.count().__next__)
    return tuple(map(numbers.__getitem__, storages))


@attrs.define
class _LookedAt:
    """The parts of calls that a fingerprint contains, as numbers: form and classes, sizes, size classes."""

    marks: dict[Call, int] = attrs.field(factory=dict)
    sizes: dict[Call, int] = attrs.field(factory=dict)
    rough: dict[Call, int] = attrs.field(factory=dict)
    numbered: dict[object, int] = attrs.field(factory=dict)
    numbers: Iterator[int] = attrs.field(factory=itertools.count)  # never gives two threads the same, nor one twice

    def number(self, key: object) -> int:
        return self.numbered.setdefault(key, next(self.numbers))

    def look(self, call: Call) -> None:
        metas = [*call.operands, *[m for m in call.results if m is not None]]
        kinds = tuple((m.dtype, len(m.shape), m.device, m.conj, m.neg) for m in metas)
        weights = weights_in(call)
        shapes = [m.shape if i in weights else tuple(map(_class_of, m.shape)) for i, m in enumerate(metas)]
        marks = self.number((call.signature.id, kinds, call.random, call.inplace, call.aliases))
        sizes = self.number(("sizes", tuple((m.shape, m.stride, m.offset) for m in metas)))
        rough = self.number(("rough", tuple(shapes)))
        self.sizes[call], self.rough[call] = sizes, rough
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


def weights_in(call: Call) -> range:
    """The operands that are certainly weights; their sizes tell models of one architecture apart."""
    name, operands = call.op.removeprefix("aten::").partition(".")[0], call.operands
    if name in _WEIGHED:
        return range(1, len(operands))
    if name in EMBEDDING:
        return range(1)
    if name == "matmul" and len(operands[0].shape) > len(operands[-1].shape) == _MATRIX:
        return range(1, 2)
    return range(0)


def _class_of(size: int) -> int:
    """The class of a size or number: itself where it is small, else how many times it is sixteen times as large."""
    if -_EXACT_BELOW < size < _EXACT_BELOW:
        return size
    reached = _EXACT_BELOW + size.bit_length() // _BITS
    return reached if size > 0 else -reached


def _class_of_slot(slot: Slot) -> Slot | str:
    """Class of a scalar: a small whole number itself, which may select an op's mode; of others (sizes, rates) the sign.

    Equal numbers have the same class, whichever type they are of: what is remembered of one is found for the other.
    """
    if slot != slot:  # noqa: PLR0124 - nan
        return "nan"
    if abs(slot) < _EXACT_BELOW and slot == int(slot):
        return int(slot)
    return "+" if slot > 0 else "-"


_classes_of_slots: dict[Slot, Slot | str] = {}


def classes_of(slots: tuple[Slot, ...]) -> tuple[Slot | str, ...]:
    """The class of each number. What is an int for one call is one for all calls of its kind, so equal ones are one here."""
    found = list(map(_classes_of_slots.get, slots))
    if None not in found:
        return tuple(found)  # type: ignore[arg-type] # no None is left
    if len(_classes_of_slots) > _REMEMBERED:
        _classes_of_slots.clear()
    for slot in slots:
        if slot not in _classes_of_slots:
            _classes_of_slots[slot] = _class_of_slot(slot)
    return tuple([_classes_of_slots[slot] if slot in _classes_of_slots else _class_of_slot(slot) for slot in slots])
