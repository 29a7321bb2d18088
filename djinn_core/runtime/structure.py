"""The structure of a program: which value each position names, which values share memory, and which die."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any

import attrs

from djinn_core.ir.program import Program
from djinn_core.ir.values import storage_of

_FEW = 2  # positions: below, `itemgetter` returns no tuple

Take = Callable[[Sequence[Any]], tuple[Any, ...]]


@attrs.frozen
class _Renaming:
    """How a sequence repeats its elements: which of them are new, and which earlier one each position shows again."""

    new: Take
    again: Take

    @classmethod
    def of(cls, numbers: Sequence[int]) -> _Renaming:
        """`numbers` count elements by first appearance."""
        first: dict[int, int] = {}
        for position, number in enumerate(numbers):
            first.setdefault(number, position)
        return cls(_taking(tuple(first.values())), _taking(tuple(numbers)))

    def distinct(self, elements: Sequence[Any]) -> tuple[Any, ...] | None:
        """The distinct elements by first appearance, where they repeat in this way; otherwise None."""
        found = self.new(elements)
        if self.again(found) != tuple(elements) or len(set(found)) != len(found):
            return None
        return found


@attrs.frozen
class Structure:
    """What programs of equal calls must have in common for one plan to serve them.

    Comparing a program with it runs in C but for one loop over its values, unlike finding its structure anew.
    """

    _length: int
    _values: _Renaming
    _storages: _Renaming
    _dead: Take

    def values_of(self, program: Program) -> tuple[int, ...] | None:
        """The program's values by first appearance, where it has this structure; otherwise None."""
        if len(program.operands) != self._length:
            return None
        values = self._values.distinct(program.operands)
        if values is None or self._storages.distinct([storage_of(v) for v in values]) is None:
            return None
        return values if program.dead == frozenset(self._dead(values)) else None


def calls_of(program: Program) -> Hashable:
    """What the calls of programs of one structure have in common."""
    return tuple([call.signature.id for call in program.calls])


def structure_of(program: Program) -> tuple[Structure, tuple[int, ...]]:
    """The structure of a program, and its values by first appearance."""
    numbers: dict[int, int] = {}
    references = [numbers.setdefault(h, len(numbers)) for h in program.operands]
    storages: dict[int, int] = {}
    shared = [storages.setdefault(storage_of(h), len(storages)) for h in numbers]
    dead = _taking(tuple(sorted([numbers[h] for h in program.dead])))
    return Structure(len(references), _Renaming.of(references), _Renaming.of(shared), dead), tuple(numbers)


def _taking(positions: tuple[int, ...]) -> Take:
    if len(positions) >= _FEW:
        return itemgetter(*positions)
    return lambda elements: tuple([elements[p] for p in positions])
