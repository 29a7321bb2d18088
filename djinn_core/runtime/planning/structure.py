"""The structure of a program: which value each position names, which values share memory, and which die.

Programs whose calls are of the same kinds have the same counts of operands and results, and their results are new values,
each in new memory or in that of the operand that the call says. So what is left to compare is which positions name a value
once more, which values from outside share memory, and what dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import attrs

from djinn_core.ir.program import Program
from djinn_core.ir.values import storages_of

_FEW = 2  # positions: below, `itemgetter` returns no tuple

Take = Callable[[Sequence[Any]], tuple[Any, ...]]


@attrs.frozen
class ProgramStructure:
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
