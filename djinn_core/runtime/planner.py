"""Plans each new program once, and finds the plan again for every program of the same structure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from djinn_core.ir.program import Program
from djinn_core.ir.schedule import ExecutionSchedule, Run
from djinn_core.runtime.stats import Stats
from djinn_core.runtime.template import Prepared, make_template

PREPARED_LIMIT = 2048  # structures that are remembered; the least recently used go first
VARIANTS_LIMIT = 4  # plans of one structure that differ in the scalars that they rely on

PlanProgram = Callable[[Program], ExecutionSchedule]


class Planner:
    """From programs to prepared templates. Not thread-safe: the session's lock is held around it."""

    def __init__(self, plan: PlanProgram, stats: Stats) -> None:
        self._plan = plan
        self._stats = stats
        self._prepared: OrderedDict[Hashable, list[Prepared]] = OrderedDict()

    def prepare(self, program: Program) -> tuple[Prepared, list[int]]:
        """The plan of a program, and its values by first appearance."""
        numbers: dict[int, int] = {}
        references = [numbers.setdefault(h, len(numbers)) for h in program.operands]
        dead = sorted([numbers[h] for h in program.dead])
        key = (tuple([c.signature.id for c in program.calls]), tuple(references), tuple(dead))
        variants = self._prepared.get(key)
        if variants is None:
            variants = self._prepared[key] = []
            while len(self._prepared) > PREPARED_LIMIT:
                self._prepared.popitem(last=False)
        else:
            self._prepared.move_to_end(key)
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
