"""What tells programs apart whose plans may differ, found in a fraction of the time that planning takes.

Values are numbered by first appearance, so that the next step of a loop looks like the last. Everything else counts exactly
where some plugin may look at it: sizes, scalars, dtypes, what dies. A plugin that says the same for sizes and numbers of the
same class says so by its attribute `tolerates_growth`; where all do, sizes from 8 and whole numbers from 8 count by class
only, to within a factor of two, but for the sizes of weights. Then how many different sizes there are in a class still
counts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from djinn_core.ir.families import CONVOLUTION, EMBEDDING, MATRIX_PRODUCT, NORMALISATION
from djinn_core.ir.program import Call, Program, Slot
from djinn_core.ir.values import TensorMeta

_EXACT_BELOW = 8
_REMEMBERED = 65536
_WEIGHED = CONVOLUTION | EMBEDDING | MATRIX_PRODUCT | NORMALISATION


@attrs.frozen
class Fingerprint:
    """What a program's plan depends on, with its values numbered by first appearance. Valid in this process only.

    Attributes:
        topology: ops, data flow, shared memory and what is dead at the end, without sizes and numbers.
        shapes: sizes and numbers, exact or by class.
        values: the program's values in order of first appearance.
    """

    topology: tuple[object, ...]
    shapes: tuple[object, ...]
    values: tuple[int, ...]


def tolerates_growth(plugins: Iterable[Any]) -> bool:
    """Whether all of these objects say the same for sizes and numbers of the same class."""
    return all(getattr(plugin, "tolerates_growth", False) for plugin in plugins)


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
        return Fingerprint(topology, (tuple(map(looked.sizes.__getitem__, calls)), slots), tuple(numbers))
    rough = tuple(map(looked.rough.__getitem__, calls))
    sizes = frozenset().union(*{*map(looked.all_sizes.__getitem__, calls)})
    classes = tuple(sorted(map(_class_of, sizes)))  # how many different sizes there are in each class
    return Fingerprint(topology, (rough, classes, _slot_classes(slots)), tuple(numbers))


def _shared(values: Mapping[int, int]) -> tuple[int, ...]:
    """Which values share memory; nothing where none do."""
    storages = [v >> 32 for v in values]
    if len({*storages}) == len(storages):
        return ()
    numbers: defaultdict[int, int] = defaultdict(itertools.count().__next__)
    return tuple(map(numbers.__getitem__, storages))


@attrs.define
class _LookedAt:
    """What counts of calls, as numbers: what they are, their sizes, the classes of these; and the set of their sizes."""

    marks: dict[Call, int] = attrs.field(factory=dict)
    sizes: dict[Call, int] = attrs.field(factory=dict)
    rough: dict[Call, int] = attrs.field(factory=dict)
    all_sizes: dict[Call, frozenset[int]] = attrs.field(factory=dict)
    numbered: dict[object, int] = attrs.field(factory=dict)
    sets: dict[frozenset[int], frozenset[int]] = attrs.field(factory=dict)

    def number(self, key: object) -> int:
        return self.numbered.setdefault(key, next(_numbers))

    def look(self, call: Call) -> None:
        metas = [*call.operands, *[m for m in call.results if m is not None]]
        kinds = tuple((m.dtype, len(m.shape), m.device, m.conj, m.neg) for m in metas)
        weighed = call.op.removeprefix("aten::").partition(".")[0] in _WEIGHED
        sizes = frozenset(n for m in metas for n in m.shape if n >= _EXACT_BELOW)
        self.all_sizes[call] = self.sets.setdefault(sizes, sizes)
        self.sizes[call] = self.number(("sizes", tuple((m.shape, m.stride, m.offset) for m in metas)))
        self.rough[call] = self.number(("rough", tuple(_rough_shape(m, weighed) for m in metas)))
        self.marks[call] = self.number((call.signature.id, kinds, call.random, call.inplace, call.aliases))


_numbers = itertools.count()  # never gives two threads the same number, nor one twice
_latest = _LookedAt()


def _looked_at(calls: tuple[Call, ...]) -> _LookedAt:
    """A table with all of these calls. A full one is replaced, not emptied: other threads may be reading it."""
    global _latest
    table = _latest
    if len(table.marks) > _REMEMBERED:
        table = _latest = _LookedAt()
    for call in {*calls} - table.marks.keys():
        table.look(call)
    return table


def _rough_shape(meta: TensorMeta, weighed: bool) -> tuple[int, ...]:
    if weighed and len(meta.shape) <= 2 and meta.dtype.is_floating_point:
        return meta.shape
    return tuple(map(_class_of, meta.shape))


def _class_of(size: int) -> int:
    """The class of a size or number: itself where it is small, else the power of two that it reaches."""
    if -_EXACT_BELOW < size < _EXACT_BELOW:
        return size
    return _EXACT_BELOW + size.bit_length() if size > 0 else -_EXACT_BELOW - size.bit_length()


_classes_of_slots: dict[Slot, Slot] = {}


def _slot_classes(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    found = list(map(_classes_of_slots.get, slots))
    if None not in found:
        return tuple(found)  # type: ignore[arg-type] # no None is left
    if len(_classes_of_slots) > _REMEMBERED:
        _classes_of_slots.clear()
    for slot in slots:
        if slot not in _classes_of_slots:
            _classes_of_slots[slot] = (
                slot if isinstance(slot, float) or slot is True or slot is False else _class_of(slot)
            )
    return tuple([_classes_of_slots.get(slot, slot) for slot in slots])
