"""Plans of programs, found again by what plans depend on.

A program is looked up by its structure, then by the classes of its numbers, then by its sizes: a plan serves all sizes within a
range (see `SizeRange`). C++ makes the key of a structure where it recorded the program.

Programs whose calls are of the same kinds have the same counts of operands and results, and their results are new values,
each in new memory or in that of the operand that the call says. So what is left to compare of their structure is which positions
name a value once more, which values from outside share memory, and what dies.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np

from djinn_client.runtime.planning.size_range import FACTOR, Place, SizeRange, SlotKind, size_range, slot_kinds
from djinn_core.ir.program import Program, Slot
from djinn_core.ir.slot_arrays import Words, decoded_slots
from djinn_core.system.lru import LruCache
from djinn_core.wire.templates import TemplateCache

_REMEMBERED: Final = 65536


class ScalarClasses:
    """The class of each scalar: a small whole number is one of its own; of others (sizes, rates) the sign counts.

    Equal numbers have the same class, whichever type they are of: what is an int for one call is one for all calls of its kind.
    """

    def __init__(self, exact_below: int) -> None:
        """Tell whole numbers apart whose absolute value is less than `exact_below`."""
        self._exact_below = exact_below
        self._known: dict[Slot, Slot | str] = {}

    def of(self, slots: tuple[Slot, ...]) -> tuple[Slot | str, ...]:
        """The class of each scalar."""
        known = self._known
        found = list(map(known.get, slots))
        if None not in found:
            return tuple(found)  # type: ignore[arg-type] # no None is left
        if len(known) > _REMEMBERED:
            known.clear()
        known.update((slot, self._class_of(slot)) for slot in slots if slot not in known)
        return tuple([known[slot] if slot in known else self._class_of(slot) for slot in slots])

    def _class_of(self, slot: Slot) -> Slot | str:
        if slot != slot:  # noqa: PLR0124 - nan
            return "nan"
        if abs(slot) < self._exact_below and slot == int(slot):
            return int(slot)
        return "+" if slot > 0 else "-"


CLASSES_LIMIT = 16  # classes of the scalars of programs of one structure; the least recently used go first
_MODES_BELOW, _QUANTITIES_BELOW = 8, 2  # whole numbers below which each counts exactly
EXACT_LIMIT = 64  # programs of the same calls and scalars that are found by these; the same
RANGES_LIMIT = 8  # ranges of sizes of one structure; the same

P = TypeVar("P")


class SizeRangePlans(msgspec.Struct, Generic[P]):
    """The plans for programs of one structure whose sizes are near each other.

    Attributes:
        by_call: of each call the places of values from outside, by position in the range.
        positions: of the sizes among the slots.
        last: of the last program that was found to be in the range the numbers of calls, what these are comparable with, and the sizes.
    """

    sizes: SizeRange
    by_call: dict[int, list[int]]
    positions: Words
    variants: list[P] = msgspec.field(default_factory=list)
    last: tuple[int, Words, Words] | None = None

    def covers(self, program: Program) -> bool:
        """True if the sizes of a program of the structure are in the range. Only what differs from the last program is looked at."""
        if (numbers := program.call_numbers) is None:
            return self.sizes.covers(program)
        generation, calls = numbers
        bits, kinds = program.scalars
        sizes = bits[self.positions]
        if self.last is None or self.last[0] != generation:
            near = self.sizes.covers(program)
        else:
            of_calls, others = np.flatnonzero(self.last[1] != calls).tolist(), np.flatnonzero(self.last[2] != sizes)
            slots = decoded_slots(sizes[others], kinds[self.positions[others]])
            places = [i for call in of_calls for i in self.by_call.get(call, ())]
            near = self.sizes.covers_parts(program, places, zip(others.tolist(), slots, strict=True))
        if near:
            self.last = generation, calls.copy(), sizes
        return near


class _StructurePlans(msgspec.Struct, Generic[P]):
    """Programs of one structure, by the classes of their scalars.

    Attributes:
        modes, quantities: positions of the scalars of these kinds among the slots. picked: of both.
        sizes: positions of the sizes. places: as `SizeRange` has them.
        ranges: plans by classes and sizes, the last ones used first. of_scalars: the same by the scalars themselves.
    """

    modes: Sequence[int]
    quantities: Sequence[int]
    picked: Words
    sizes: Words
    places: tuple[Place, ...]
    by_call: dict[int, list[int]]
    ranges: LruCache[Hashable, list[SizeRangePlans[P]]] = msgspec.field(default_factory=lambda: LruCache(CLASSES_LIMIT))
    of_scalars: LruCache[Hashable, list[SizeRangePlans[P]]] = msgspec.field(
        default_factory=lambda: LruCache(CLASSES_LIMIT)
    )


class PlanCache(Generic[P]):
    """Plans of programs, found by structure, classes of scalars and range of sizes.

    Programs have the same structure when calls of the same kinds follow one another, values flow and die alike, and the same values
    share memory: what a plan left out may matter where two inputs look into one storage.
    """

    def __init__(self, factor: int = FACTOR) -> None:
        """`factor`: how many times as large or as small sizes may be as those that a plan was made for."""
        self.factor = factor
        self.ranges_left = 0  # how often the sizes of a program of a known structure were in no range
        # A loop has the very same calls and scalars each time, and only its values may be other ones.
        self._exact: LruCache[Hashable, SizeRangePlans[P]] = LruCache(EXACT_LIMIT)
        self._structures: TemplateCache[_StructurePlans[P]] = TemplateCache()
        self._modes, self._quantities = ScalarClasses(_MODES_BELOW), ScalarClasses(_QUANTITIES_BELOW)

    def find(self, program: Program) -> tuple[list[P], Words]:
        """The plans of the program's structure and sizes, to which new ones are added, and its values by first appearance."""
        structure = program.structure
        found = self._exact.get(same := (structure, program.exact))
        if found is None:
            found = self._find(structure, program)
            self._exact.store(same, found)
        return found.variants, program.values

    def _find(self, structure: Hashable, program: Program) -> SizeRangePlans[P]:
        alike = self._structures.get(structure)
        if alike is None:
            alike = _alike_of(program)
            self._structures.put(structure, alike, len(program))
        bits, kinds = program.scalars
        scalars = bits[alike.picked].tobytes(), kinds[alike.picked].tobytes()
        if (ranges := alike.of_scalars.use(scalars)) is None:
            slots = program.slots
            modes, quantities = (tuple([slots[p] for p in places]) for places in (alike.modes, alike.quantities))
            classes = (self._modes.of(modes), self._quantities.of(quantities))
            if (ranges := alike.ranges.use(classes)) is None:
                alike.ranges.store(classes, ranges := [])
            alike.of_scalars.store(scalars, ranges)
        for index, one in enumerate(ranges):
            if one.covers(program):
                if index:
                    ranges.insert(0, ranges.pop(index))
                return one
        if ranges:
            self.ranges_left += 1
        sizes = size_range(program, alike.places, alike.sizes.tolist(), self.factor)
        ranges.insert(0, SizeRangePlans(sizes, alike.by_call, alike.sizes))
        del ranges[RANGES_LIMIT:]
        return ranges[0]


def _alike_of(program: Program) -> _StructurePlans[Any]:
    positions: dict[SlotKind, list[int]] = {kind: [] for kind in SlotKind}
    for position, kind in enumerate(kind for call in program.calls for kind in slot_kinds(call)):
        positions[kind].append(position)
    modes, quantities, sizes = (positions[kind] for kind in (SlotKind.MODE, SlotKind.QUANTITY, SlotKind.SIZE))
    places = tuple(program.inputs().values())
    by_call: dict[int, list[int]] = {}
    for index, (call, _) in enumerate(places):
        by_call.setdefault(call, []).append(index)
    picked = np.array([*modes, *quantities], np.int64)
    return _StructurePlans(modes, quantities, picked, np.array(sizes, np.int64), places, by_call)
