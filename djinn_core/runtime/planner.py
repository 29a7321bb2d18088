"""Plans each new program once, and finds the plan again for every program of the same structure."""

from __future__ import annotations

from collections.abc import Callable

from djinn_core.ir.program import Program
from djinn_core.ir.schedule import ExecutionSchedule, Run
from djinn_core.ir.values import storage_of
from djinn_core.runtime.stats import Stats
from djinn_core.runtime.template import Prepared, make_template
from djinn_core.wire.templates import TemplateCache

VARIANTS_LIMIT = 4  # plans of one structure that differ in the scalars that they rely on

PlanProgram = Callable[[Program], ExecutionSchedule]


class Planner:
    """From programs to prepared templates. Not thread-safe: the session's lock is held around it.

    Programs have the same structure when their calls have the same signatures, values flow and die alike, and the same
    values share memory: what a plan left out may matter where two inputs look into one storage.
    """

    def __init__(self, plan: PlanProgram, stats: Stats) -> None:
        self._plan = plan
        self._stats = stats
        self._prepared: TemplateCache[list[Prepared]] = TemplateCache()

    def prepare(self, program: Program) -> tuple[Prepared, list[int]]:
        """The plan of a program, and its values by first appearance."""
        numbers: dict[int, int] = {}
        references = [numbers.setdefault(h, len(numbers)) for h in program.operands]
        dead = sorted([numbers[h] for h in program.dead])
        storages: dict[int, int] = {}
        shared = [storages.setdefault(storage_of(h), len(storages)) for h in numbers]
        key = (tuple([c.signature.id for c in program.calls]), tuple(references), tuple(shared), tuple(dead))
        variants = self._prepared.get(key)
        if variants is None:
            variants = []
            self._prepared.put(key, variants, len(program))
        for prepared in variants:
            if prepared.holds_for(program):
                self._stats.plans_reused += 1
                return prepared, list(numbers)
        prepared = self._make(program)
        variants.append(prepared)
        del variants[:-VARIANTS_LIMIT]
        return prepared, list(numbers)

    def _make(self, program: Program) -> Prepared:
        self._stats.plans_made += 1
        schedule = self._plan(program)
        (steps,) = schedule.steps.values()
        nodes = [node for step in steps if isinstance(step, Run) for node in step.nodes]
        return make_template(program, nodes, schedule.replace, schedule.equal_slots)
