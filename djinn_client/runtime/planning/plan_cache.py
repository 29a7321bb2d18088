"""Plan cache: finds the plan of a program by everything that the plan depends on.

The cache looks up the structure of a program, then the classes of its numbers, then its sizes. A plan serves all sizes
within a range (see `SizeRange`). C++ computes the structure's key while it records the program.

Programs with calls of the same kinds have the same counts of operands and results. Each result is a new value, in new
memory or in the memory of the operand that the call names.

The structure key therefore has three more parts:

- the positions that repeat a value
- the inputs that share memory
- the values that die
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np

from djinn_client.runtime.planning.size_range import FACTOR, InputOperand, SizeRange, SlotKind, size_range, slot_kinds
from djinn_core.ir.program import Program, Slot
from djinn_core.ir.slot_arrays import Words, decoded_slots
from djinn_core.system.lru import LruCache
from djinn_core.wire.templates import TemplateCache

_SCALARS_LIMIT: Final = 65536


class ScalarClasses:
    """Assign a class to each scalar. Each small integer has its own class. All other numbers of one sign share a class.

    Equal numbers have the same class, whatever their type: a scalar that is an int in one call is an int in all calls
    of its kind.
    """

    def __init__(self, exact_below: int) -> None:
        """Create classes. Each integer with an absolute value below `exact_below` has its own class."""
        self._exact_below = exact_below
        self._classes: dict[Slot, Slot | str] = {}

    def of(self, slots: tuple[Slot, ...]) -> tuple[Slot | str, ...]:
        """Return the class of each scalar."""
        classes = self._classes
        slot_classes = list(map(classes.get, slots))
        if None not in slot_classes:
            return tuple(slot_classes)  # type: ignore[arg-type] # no None is left
        if len(classes) > _SCALARS_LIMIT:
            classes.clear()
        classes.update((slot, self._class_of(slot)) for slot in slots if slot not in classes)
        return tuple([classes[slot] if slot in classes else self._class_of(slot) for slot in slots])

    def _class_of(self, slot: Slot) -> Slot | str:
        if slot != slot:  # noqa: PLR0124 - nan
            return "nan"
        if abs(slot) < self._exact_below and slot == int(slot):
            return int(slot)
        return "+" if slot > 0 else "-"


CLASSES_LIMIT = 16  # limit of scalar classes per structure; the least recently used are evicted first
_MODES_BELOW, _QUANTITIES_BELOW = 8, 2  # integers below this have their own class
EXACT_LIMIT = 64  # limit of exact programs (calls and scalars) in the fast lookup; evicted likewise
RANGES_LIMIT = 8  # limit of size ranges per structure; evicted likewise

P = TypeVar("P")


class SizeRangePlans(msgspec.Struct, Generic[P]):
    """The plans for programs of one structure with similar sizes.

    Attributes:
        sizes: the range.
        by_call: for each call, the inputs that this call is the first to read, as indexes of `SizeRange.inputs`.
        positions: positions of the sizes among the slots.
        variants: the plans.
        last: generation of the call numbers, call numbers, and sizes of the last program in the range.
    """

    sizes: SizeRange
    by_call: dict[int, list[int]]
    positions: Words
    variants: list[P] = msgspec.field(default_factory=list)
    last: tuple[int, Words, Words] | None = None

    def covers(self, program: Program) -> bool:
        """Return True if the sizes of a program with this structure are in the range.

        This compares only the differences from the last program.
        """
        if (numbers := program.call_numbers) is None:
            return self.sizes.covers(program)
        generation, calls = numbers
        bits, kinds = program.scalars
        sizes = bits[self.positions]
        if self.last is None or self.last[0] != generation:
            is_covered = self.sizes.covers(program)
        else:
            changed_calls, changed_sizes = (
                np.flatnonzero(self.last[1] != calls).tolist(),
                np.flatnonzero(self.last[2] != sizes),
            )
            slots = decoded_slots(sizes[changed_sizes], kinds[self.positions[changed_sizes]])
            inputs = [i for call in changed_calls for i in self.by_call.get(call, ())]
            is_covered = self.sizes.covers_parts(program, inputs, zip(changed_sizes.tolist(), slots, strict=True))
        if is_covered:
            self.last = generation, calls.copy(), sizes
        return is_covered


class _StructurePlans(msgspec.Struct, Generic[P]):
    """Plans for programs of one structure, by the classes of their scalars.

    Attributes:
        modes: positions, among the slots, of scalars that are modes (`SlotKind`).
        quantities: positions, among the slots, of scalars that are quantities (`SlotKind`).
        class_slots: positions of modes and quantities.
        sizes: positions, among the slots, of sizes.
        inputs: as in `SizeRange`.
        by_call: as in `SizeRangePlans`.
        ranges: plans by classes of modes and quantities. Size ranges are ordered by their last use, latest first.
        by_scalars: the lists in `ranges`, by exact modes and quantities.
    """

    modes: Sequence[int]
    quantities: Sequence[int]
    class_slots: Words
    sizes: Words
    inputs: tuple[InputOperand, ...]
    by_call: dict[int, list[int]]
    ranges: LruCache[Hashable, list[SizeRangePlans[P]]] = msgspec.field(default_factory=lambda: LruCache(CLASSES_LIMIT))
    by_scalars: LruCache[Hashable, list[SizeRangePlans[P]]] = msgspec.field(
        default_factory=lambda: LruCache(CLASSES_LIMIT)
    )


class PlanCache(Generic[P]):
    """Plans of programs, found by structure, classes of scalars and range of sizes.

    Programs have the same structure if their kinds of calls, data flow, dying values and memory sharing are equal.
    Memory sharing counts, because a plan may drop writes that would be visible through another input of the storage.

    Attributes:
        factor: as in `SizeRange`.
        ranges_left: number of programs with a known structure whose sizes were in no range.
    """

    def __init__(self, factor: int = FACTOR) -> None:
        """Create an empty cache.

        `factor`: a plan serves sizes between its own sizes divided by `factor` and its own sizes times `factor`.
        """
        self.factor = factor
        self.ranges_left = 0
        # Every iteration of a loop has the same calls and scalars; only its values may differ.
        self._exact: LruCache[Hashable, SizeRangePlans[P]] = LruCache(EXACT_LIMIT)
        self._structures: TemplateCache[_StructurePlans[P]] = TemplateCache()
        self._modes, self._quantities = ScalarClasses(_MODES_BELOW), ScalarClasses(_QUANTITIES_BELOW)

    def find(self, program: Program) -> tuple[list[P], Words]:
        """Return the plans for the program's structure and sizes, and the program's values.

        The caller appends new plans to the list.
        """
        structure = program.structure
        plan = self._exact.get(exact_key := (structure, program.exact))
        if plan is None:
            plan = self._find(structure, program)
            self._exact.store(exact_key, plan)
        return plan.variants, program.values

    def _find(self, structure: Hashable, program: Program) -> SizeRangePlans[P]:
        plans = self._structures.get(structure)
        if plans is None:
            plans = _new_structure(program)
            self._structures.put(structure, plans, len(program))
        bits, kinds = program.scalars
        scalars = bits[plans.class_slots].tobytes(), kinds[plans.class_slots].tobytes()
        if (ranges := plans.by_scalars.use(scalars)) is None:
            slots = program.slots
            modes, quantities = (tuple([slots[p] for p in positions]) for positions in (plans.modes, plans.quantities))
            classes = (self._modes.of(modes), self._quantities.of(quantities))
            if (ranges := plans.ranges.use(classes)) is None:
                plans.ranges.store(classes, ranges := [])
            plans.by_scalars.store(scalars, ranges)
        for index, size_plans in enumerate(ranges):
            if size_plans.covers(program):
                if index:
                    ranges.insert(0, ranges.pop(index))
                return size_plans
        if ranges:
            self.ranges_left += 1
        sizes = size_range(program, plans.inputs, plans.sizes.tolist(), self.factor)
        ranges.insert(0, SizeRangePlans(sizes, plans.by_call, plans.sizes))
        del ranges[RANGES_LIMIT:]
        return ranges[0]


def _new_structure(program: Program) -> _StructurePlans[Any]:
    positions: dict[SlotKind, list[int]] = {kind: [] for kind in SlotKind}
    for position, kind in enumerate(kind for call in program.calls for kind in slot_kinds(call)):
        positions[kind].append(position)
    modes, quantities, sizes = (positions[kind] for kind in (SlotKind.MODE, SlotKind.QUANTITY, SlotKind.SIZE))
    inputs = tuple(program.inputs().values())
    by_call: dict[int, list[int]] = {}
    for index, (call, _) in enumerate(inputs):
        by_call.setdefault(call, []).append(index)
    class_slots = np.array([*modes, *quantities], np.int64)
    return _StructurePlans(modes, quantities, class_slots, np.array(sizes, np.int64), inputs, by_call)
