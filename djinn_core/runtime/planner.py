"""Plans each new program once, and finds the plan again for every program of the same structure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import attrs

from djinn_core.ir.program import Program
from djinn_core.ir.schedule import ExecutionSchedule, Run
from djinn_core.runtime.earlier import RECENT, Recent
from djinn_core.runtime.stats import Stats
from djinn_core.runtime.structure import Structure, calls_of, structure_of
from djinn_core.runtime.template import Prepared, make_template
from djinn_core.wire.templates import TemplateCache

VARIANTS_LIMIT = 4  # plans of one structure that differ in the scalars that they rely on
STRUCTURES_LIMIT = 16  # structures of programs with the same calls; the least recently used goes first

PlanProgram = Callable[[Program], ExecutionSchedule]
P = TypeVar("P")


@attrs.define
class _Planned(Generic[P]):
    """Programs of one structure, and the plans for them."""

    structure: Structure
    variants: list[P] = attrs.field(factory=list)


class PlansByStructure(Generic[P]):
    """Plans of programs, found by structure.

    Programs have the same structure when their calls have the same signatures, values flow and die alike, and the same
    values share memory: what a plan left out may matter where two inputs look into one storage.
    """

    def __init__(self) -> None:
        self._planned: TemplateCache[list[_Planned[P]]] = TemplateCache()

    def find(self, program: Program) -> tuple[list[P], tuple[int, ...]]:
        """The plans of the program's structure, to which new ones are added, and its values by first appearance."""
        calls = calls_of(program)
        alike = self._planned.get(calls)
        if alike is None:
            alike = []
            self._planned.put(calls, alike, len(program))
        for index, planned in enumerate(alike):
            found = planned.structure.values_of(program)
            if found is not None:
                if index:
                    alike.insert(0, alike.pop(index))
                return planned.variants, found
        structure, values = structure_of(program)
        alike.insert(0, _Planned(structure))
        del alike[STRUCTURES_LIMIT:]
        return alike[0].variants, values


class Planner:
    """From programs to prepared templates. Not thread-safe: the session's lock is held around it."""

    def __init__(
        self, plan: PlanProgram, stats: Stats, made: Callable[[Prepared, Program], None] = lambda _, __: None
    ) -> None:
        """`made` is told of each new plan and its program; `recent` are plans that were asked for, the latest last."""
        self.recent: Recent = deque(maxlen=RECENT)
        self._plan = plan
        self._made = made
        self._stats = stats
        self._planned: PlansByStructure[Prepared] = PlansByStructure()

    def prepare(self, program: Program) -> tuple[Prepared, list[int]]:
        """The plan of a program, and its values by first appearance."""
        variants, values = self._planned.find(program)
        for prepared in variants:
            if prepared.holds_for(program):
                self._stats.plans_reused += 1
                self.recent.append((prepared, values))
                return prepared, list(values)
        prepared = self._make(program)
        self.recent.append((prepared, values))
        self._made(prepared, program)
        variants.append(prepared)
        del variants[:-VARIANTS_LIMIT]
        return prepared, list(values)

    def _make(self, program: Program) -> Prepared:
        self._stats.plans_made += 1
        schedule = self._plan(program)
        (steps,) = schedule.steps.values()
        nodes = [node for step in steps if isinstance(step, Run) for node in step.nodes]
        return make_template(program, nodes, schedule.replace, schedule.equal_slots)
