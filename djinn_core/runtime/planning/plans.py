"""Plans of programs, found again by what plans depend on.

A program is looked up by the kinds of its calls and the classes of its numbers, then by its structure, then by its sizes: a
plan serves all sizes within a range (see `SizeRange`). Nothing here is done for each op but look-ups in C.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

import attrs

from djinn_core.ir.program import Program, Slot
from djinn_core.lru import LruCache
from djinn_core.runtime.planning.scalar_classes import ScalarClasses
from djinn_core.runtime.planning.size_range import FACTOR, SizeRange, SlotKind, size_range, slot_kinds
from djinn_core.runtime.planning.structure import ProgramStructure, structure_of, taking
from djinn_core.wire.templates import TemplateCache

STRUCTURES_LIMIT = 16  # structures of programs with the same kinds of calls; the least recently used goes first
_MODES_BELOW, _QUANTITIES_BELOW = 8, 2  # whole numbers below which each counts exactly
EXACT_LIMIT = 64  # programs of the same calls and scalars that are found by these; the same
RANGES_LIMIT = 8  # ranges of sizes of one structure; the same

P = TypeVar("P")
_kind = attrgetter("kind")


@attrs.define
class Range(Generic[P]):
    """Programs of one structure whose sizes are near each other, and the plans for them."""

    sizes: SizeRange
    calls: Sequence[Any]  # of the last program that was found to be in the range
    slots: tuple[Slot, ...]
    variants: list[P] = attrs.field(factory=list)

    def covers(self, program: Program) -> bool:
        """True if the sizes of a program of the structure are in the range."""
        if program.calls == self.calls and program.slots == self.slots:
            return True
        if not self.sizes.covers(program):
            return False
        self.calls, self.slots = program.calls, program.slots
        return True


@attrs.define
class _Planned(Generic[P]):
    """Programs of one structure, by sizes, the last ones used first."""

    structure: ProgramStructure
    ranges: list[Range[P]] = attrs.field(factory=list)


@attrs.frozen
class Found(Generic[P]):
    """Classification of a program: its structure, the classes of its scalars, and its range of sizes."""

    structure: ProgramStructure
    classes: Hashable
    range: Range[P]


@attrs.define
class _SameCalls(Generic[P]):
    """Programs whose calls are of the same kinds, by the classes of their scalars and by structure.

    Attributes:
        modes, quantities: pick the scalars of these kinds from the slots. sizes: positions of the sizes.
        planned: structures by the classes of modes and quantities, the last one used first.
    """

    modes: Callable[[Sequence[Slot]], tuple[Slot, ...]]
    quantities: Callable[[Sequence[Slot]], tuple[Slot, ...]]
    sizes: tuple[int, ...]
    planned: LruCache[Hashable, list[_Planned[P]]] = attrs.field(factory=lambda: LruCache(STRUCTURES_LIMIT))

    def find(self, program: Program, key: Hashable) -> tuple[_Planned[P], tuple[int, ...]]:
        """The plans for programs of the structure that this one has, and its values; `key`: classes of its scalars."""
        structures = self.planned.use(key)
        if structures is None:
            structures = []
            self.planned.store(key, structures)
        for index, planned in enumerate(structures):
            found = planned.structure.values_of(program)
            if found is not None:
                if index:
                    structures.insert(0, structures.pop(index))
                return planned, found
        structure, values = structure_of(program)
        structures.insert(0, _Planned(structure))
        del structures[STRUCTURES_LIMIT:]
        return structures[0], values


class PlansByStructure(Generic[P]):
    """Plans of programs, found by the kinds of calls, structure and range of sizes.

    Programs have the same structure when values flow and die alike, and the same values share memory: what a plan left out
    may matter where two inputs look into one storage.

    Attributes:
        latest: what the last program was found to be; absent before the first.
    """

    latest: Found[P]

    def __init__(self, factor: int = FACTOR) -> None:
        """`factor`: how many times as large or as small sizes may be as those that a plan was made for."""
        self.factor = factor
        self.ranges_left = 0  # how often the sizes of a program of a known structure were in no range
        # A loop has the very same calls and scalars each time, and only its values may be other ones.
        self._exact: LruCache[Hashable, Found[P]] = LruCache(EXACT_LIMIT)
        self._alike: TemplateCache[_SameCalls[P]] = TemplateCache()
        self._modes, self._quantities = ScalarClasses(_MODES_BELOW), ScalarClasses(_QUANTITIES_BELOW)

    def find(self, program: Program) -> tuple[list[P], tuple[int, ...]]:
        """The plans of the program's structure and sizes, to which new ones are added, and its values by first appearance."""
        found = self._exact.get(same := (program.calls, program.slots))
        if found is None or (values := found.structure.values_of_same(program)) is None:
            found, values = self._find(program)
            self._exact.store(same, found)
        self.latest = found
        return found.range.variants, values

    def _find(self, program: Program) -> tuple[Found[P], tuple[int, ...]]:
        kinds = tuple(map(_kind, program.calls))
        alike = self._alike.get(kinds)
        if alike is None:
            alike = _alike_of(program)
            self._alike.put(kinds, alike, len(program))
        slots = program.slots
        key = (self._modes.of(alike.modes(slots)), self._quantities.of(alike.quantities(slots)))
        planned, values = alike.find(program, key)
        for index, one in enumerate(planned.ranges):
            if one.covers(program):
                if index:
                    planned.ranges.insert(0, planned.ranges.pop(index))
                return Found(planned.structure, key, one), values
        if planned.ranges:
            self.ranges_left += 1
        sizes = size_range(program, planned.structure.places, alike.sizes, self.factor)
        planned.ranges.insert(0, Range(sizes, program.calls, program.slots))
        del planned.ranges[RANGES_LIMIT:]
        return Found(planned.structure, key, planned.ranges[0]), values


def _alike_of(program: Program) -> _SameCalls[Any]:
    positions: dict[SlotKind, list[int]] = {kind: [] for kind in SlotKind}
    for position, kind in enumerate(kind for call in program.calls for kind in slot_kinds(call)):
        positions[kind].append(position)
    picks = (taking(positions[SlotKind.MODE]), taking(positions[SlotKind.QUANTITY]))
    return _SameCalls(*picks, tuple(positions[SlotKind.SIZE]))
