"""Plans of programs, found again by what plans depend on.

A program is looked up by the kinds of its calls and the classes of its numbers, then by its structure, then by its sizes: a
plan serves all sizes within a range (see `SizeRange`). Nothing here is done for each op but look-ups in C.

Programs whose calls are of the same kinds have the same counts of operands and results, and their results are new values,
each in new memory or in that of the operand that the call says. So what is left to compare of their structure is which positions
name a value once more, which values from outside share memory, and what dies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final, Generic, TypeVar

import msgspec

from djinn_client.runtime.planning.size_range import FACTOR, SizeRange, SlotKind, size_range, slot_kinds
from djinn_core.ir.handles import storages_of
from djinn_core.ir.program import Program, Slot
from djinn_core.system.lru import LruCache
from djinn_core.wire.templates import TemplateCache

_FEW = 2  # positions: below, `itemgetter` returns no tuple

Take = Callable[[Sequence[Any]], tuple[Any, ...]]


class ProgramStructure(msgspec.Struct, frozen=True):
    """Structural key of a program: programs of the same calls with equal structures share a plan; comparing runs in C.

    Attributes:
        length: number of operands and results, all counted.
        first_uses: picks the first occurrence of each value. repeats: picks repeated operands; repeat_of: the first occurrence of
            each of them. `repeats` and `repeat_of` pick equal values in every program of this structure.
        inputs: picks the inputs, in order of appearance. results: picks the results.
        places: of the values from outside the first calls that take them, and their positions among these operands.
        storages: of each value from outside the number of its storage, by first appearance; None if no two share one.
        alone: whether one value is from outside.
        dying: picks, from the values, those that die.
    """

    length: int
    first_uses: Take
    repeats: Take
    repeat_of: Take
    inputs: Take
    places: tuple[tuple[int, int], ...]
    results: Take
    storages: tuple[int, ...] | None
    alone: bool
    dying: Take

    def values_of(self, program: Program) -> tuple[int, ...] | None:
        """The program's values by first appearance, where it has this structure; otherwise None."""
        return self.values_of_same(program) if len(program.operands) == self.length else None

    def values_of_same(self, program: Program) -> tuple[int, ...] | None:
        """As `values_of`, for a program that has as many operands and results."""
        operands = program.operands
        if self.repeats(operands) != self.repeat_of(operands):
            return None
        values = self.first_uses(operands)
        if program.dead != {*self.dying(values)}:
            return None
        outside, made = self.inputs(operands), self.results(operands)
        if self.alone:  # as of an op on a tensor
            return None if outside[0] in made else values
        return values if self._are_apart(outside, made) else None

    def _are_apart(self, outside: tuple[int, ...], made: tuple[int, ...]) -> bool:
        """True if these values are distinct, and the inputs among them alias each other as this structure says."""
        different = {*outside}
        if len(different) != len(outside) or not different.isdisjoint(made):
            return False
        if self.storages is None:
            return len(set(storages_of(outside))) == len(outside)
        return _numbered(storages_of(outside)) == self.storages


def structure_of(program: Program) -> tuple[ProgramStructure, tuple[int, ...]]:
    """The structure of a program, and its values by first appearance."""
    operands = program.operands
    first: dict[int, int] = {}
    repeats = [p for p, value in enumerate(operands) if first.setdefault(value, p) != p]
    results = [*_results(program)]
    made = {*results}
    outside = [p for p in first.values() if p not in made]
    storages = _numbered(storages_of([operands[p] for p in outside]))
    dying = [number for number, value in enumerate(first) if value in program.dead]
    found = ProgramStructure(
        length=len(operands),
        first_uses=taking([*first.values()]),
        repeats=taking(repeats),
        repeat_of=taking([first[operands[p]] for p in repeats]),
        inputs=taking(outside),
        places=_places(program, outside),
        results=taking(results),
        storages=None if len({*storages}) == len(storages) else storages,
        alone=len(outside) == 1,
        dying=taking(dying),
    )
    return found, tuple(first)


def _results(program: Program) -> Iterator[int]:
    """The positions of results among the operands."""
    at = 0
    for call in program.calls:
        at += call.operand_count
        yield from range(at, at + call.new_count)
        at += call.new_count


def _places(program: Program, positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The calls, and positions among their operands, of ascending positions in the list of all operands and results."""
    found: list[tuple[int, int]] = []
    left, at = iter(positions), 0
    wanted = next(left, None)
    for index, call in enumerate(program.calls):
        while wanted is not None and wanted < at + call.operand_count:
            found.append((index, wanted - at))
            wanted = next(left, None)
        at += call.operand_count + call.new_count
    return tuple(found)


def _numbered(elements: Sequence[int]) -> tuple[int, ...]:
    numbers: dict[int, int] = {}
    return tuple([numbers.setdefault(e, len(numbers)) for e in elements])


def taking(positions: Sequence[int]) -> Take:
    """Make a getter of the elements of a tuple at these positions, as a tuple."""
    if len(positions) >= _FEW:
        return itemgetter(*positions)
    start = positions[0] if positions else 0
    return itemgetter(slice(start, start + len(positions)))


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


STRUCTURES_LIMIT = 16  # structures of programs with the same kinds of calls; the least recently used goes first
_MODES_BELOW, _QUANTITIES_BELOW = 8, 2  # whole numbers below which each counts exactly
EXACT_LIMIT = 64  # programs of the same calls and scalars that are found by these; the same
RANGES_LIMIT = 8  # ranges of sizes of one structure; the same

P = TypeVar("P")
_kind = attrgetter("kind")


class SizeRangePlans(msgspec.Struct, Generic[P]):
    """Programs of one structure whose sizes are near each other, and the plans for them."""

    sizes: SizeRange
    calls: Sequence[Any]  # of the last program that was found to be in the range
    slots: tuple[Slot, ...]
    variants: list[P] = msgspec.field(default_factory=list)

    def covers(self, program: Program) -> bool:
        """True if the sizes of a program of the structure are in the range."""
        if program.calls == self.calls and program.slots == self.slots:
            return True
        if not self.sizes.covers(program):
            return False
        self.calls, self.slots = program.calls, program.slots
        return True


class _StructurePlans(msgspec.Struct, Generic[P]):
    """Programs of one structure, by sizes, the last ones used first."""

    structure: ProgramStructure
    ranges: list[SizeRangePlans[P]] = msgspec.field(default_factory=list)


class PlanLookup(msgspec.Struct, Generic[P], frozen=True):
    """Classification of a program: its structure, the classes of its scalars, and its range of sizes."""

    structure: ProgramStructure
    classes: Hashable
    range: SizeRangePlans[P]


class _KindPlans(msgspec.Struct, Generic[P]):
    """Programs whose calls are of the same kinds, by the classes of their scalars and by structure.

    Attributes:
        modes, quantities: pick the scalars of these kinds from the slots. sizes: positions of the sizes.
        planned: structures by the classes of modes and quantities, the last one used first.
    """

    modes: Callable[[Sequence[Slot]], tuple[Slot, ...]]
    quantities: Callable[[Sequence[Slot]], tuple[Slot, ...]]
    sizes: tuple[int, ...]
    planned: LruCache[Hashable, list[_StructurePlans[P]]] = msgspec.field(
        default_factory=lambda: LruCache(STRUCTURES_LIMIT)
    )

    def find(self, program: Program, key: Hashable) -> tuple[_StructurePlans[P], tuple[int, ...]]:
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
        structures.insert(0, _StructurePlans(structure))
        del structures[STRUCTURES_LIMIT:]
        return structures[0], values


class PlanCache(Generic[P]):
    """Plans of programs, found by the kinds of calls, structure and range of sizes.

    Programs have the same structure when values flow and die alike, and the same values share memory: what a plan left out
    may matter where two inputs look into one storage.

    Attributes:
        latest: what the last program was found to be; absent before the first.
    """

    latest: PlanLookup[P]

    def __init__(self, factor: int = FACTOR) -> None:
        """`factor`: how many times as large or as small sizes may be as those that a plan was made for."""
        self.factor = factor
        self.ranges_left = 0  # how often the sizes of a program of a known structure were in no range
        # A loop has the very same calls and scalars each time, and only its values may be other ones.
        self._exact: LruCache[Hashable, PlanLookup[P]] = LruCache(EXACT_LIMIT)
        self._alike: TemplateCache[_KindPlans[P]] = TemplateCache()
        self._modes, self._quantities = ScalarClasses(_MODES_BELOW), ScalarClasses(_QUANTITIES_BELOW)

    def find(self, program: Program) -> tuple[list[P], tuple[int, ...]]:
        """The plans of the program's structure and sizes, to which new ones are added, and its values by first appearance."""
        found = self._exact.get(same := (program.calls, program.slots))
        if found is None or (values := found.structure.values_of_same(program)) is None:
            found, values = self._find(program)
            self._exact.store(same, found)
        self.latest = found
        return found.range.variants, values

    def _find(self, program: Program) -> tuple[PlanLookup[P], tuple[int, ...]]:
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
                return PlanLookup(planned.structure, key, one), values
        if planned.ranges:
            self.ranges_left += 1
        sizes = size_range(program, planned.structure.places, alike.sizes, self.factor)
        planned.ranges.insert(0, SizeRangePlans(sizes, program.calls, program.slots))
        del planned.ranges[RANGES_LIMIT:]
        return PlanLookup(planned.structure, key, planned.ranges[0]), values


def _alike_of(program: Program) -> _KindPlans[Any]:
    positions: dict[SlotKind, list[int]] = {kind: [] for kind in SlotKind}
    for position, kind in enumerate(kind for call in program.calls for kind in slot_kinds(call)):
        positions[kind].append(position)
    picks = (taking(positions[SlotKind.MODE]), taking(positions[SlotKind.QUANTITY]))
    return _KindPlans(*picks, tuple(positions[SlotKind.SIZE]))
