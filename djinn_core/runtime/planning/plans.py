"""Plans of programs, found again by what counts of a program.

Two levels. The program of a loop's next step mostly has the very calls of the last one: their objects are looked up, and then
its structure and its numbers are compared, all in C. Where sizes have changed, as those of a growing cache, the calls are
looked up by kind: exactly where some plugin may look at sizes and numbers, by classes where all plugins tolerate growth.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import attrs

from djinn_core.ir.program import Program, Slot
from djinn_core.runtime.planning.structure import Structure, structure_of
from djinn_core.stages.fingerprint import classes_of, kinds_of
from djinn_core.wire.templates import TemplateCache

STRUCTURES_LIMIT = 16  # structures of programs with the same calls; the least recently used goes first
SAME_CALLS_LIMIT = 512  # programs whose very calls are remembered

P = TypeVar("P")


@attrs.define
class _Planned(Generic[P]):
    """Programs of one structure, and the plans for them."""

    structure: Structure
    variants: list[P] = attrs.field(factory=list)


@attrs.define
class _Kind(Generic[P]):
    """Programs whose calls and numbers are of the same kinds, by structure, the last one used first."""

    numbers: Hashable
    alike: list[_Planned[P]] = attrs.field(factory=list)

    def find(self, program: Program) -> tuple[_Planned[P], tuple[int, ...]]:
        """The plans for programs of the structure that this one has, and its values."""
        for index, planned in enumerate(self.alike):
            found = planned.structure.values_of(program)
            if found is not None:
                if index:
                    self.alike.insert(0, self.alike.pop(index))
                return planned, found
        structure, values = structure_of(program)
        self.alike.insert(0, _Planned(structure))
        del self.alike[STRUCTURES_LIMIT:]
        return self.alike[0], values


@attrs.frozen
class _SameCalls(Generic[P]):
    """Of programs with the very same calls the last one's numbers, and the plans for programs of its kind."""

    slots: tuple[Slot, ...]
    kind: _Kind[P]


class PlansByStructure(Generic[P]):
    """Plans of programs, found by kind and structure.

    Programs have the same structure when values flow and die alike, and the same values share memory: what a plan left out
    may matter where two inputs look into one storage.
    """

    def __init__(self, exact: bool = False) -> None:
        """`exact`: whether sizes and numbers count exactly, because some plugin may look at them."""
        self.exact = exact
        self._kinds: TemplateCache[_Kind[P]] = TemplateCache()
        self._same: TemplateCache[_SameCalls[P]] = TemplateCache(SAME_CALLS_LIMIT)

    def find(self, program: Program) -> tuple[list[P], tuple[int, ...]]:
        """The plans of the program's structure, to which new ones are added, and its values by first appearance."""
        same = self._same.get(program.calls)
        kind = same.kind if same is not None and self._fits(same, program.slots) else self._kind(program)
        planned, values = kind.find(program)
        return planned.variants, values

    def _fits(self, same: _SameCalls[P], slots: tuple[Slot, ...]) -> bool:
        if self.exact:
            return repr(slots) == same.kind.numbers
        return slots == same.slots or classes_of(slots) == same.kind.numbers

    def _kind(self, program: Program) -> _Kind[P]:
        """The kind of a program, which is remembered by its very calls as well."""
        # Written out, ints differ from floats, and zeros by their sign.
        numbers: Hashable = repr(program.slots) if self.exact else classes_of(program.slots)
        key = (kinds_of(program.calls, self.exact), numbers)
        kind = self._kinds.get(key)
        if kind is None:
            kind = _Kind(numbers)
            self._kinds.put(key, kind, len(program))
        self._same.put(program.calls, _SameCalls(program.slots, kind), len(program))
        return kind
