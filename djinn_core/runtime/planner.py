"""Plans each new program once, and finds the plan again for every program of the same structure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from djinn_core.ir.program import Program
from djinn_core.ir.schedule import ExecutionSchedule, Run
from djinn_core.runtime.earlier import RECENT, Recent
from djinn_core.runtime.plans import PlansByStructure
from djinn_core.runtime.stats import Stats
from djinn_core.runtime.template import Prepared, make_template

VARIANTS_LIMIT = 4  # plans of one structure that differ in the scalars that they rely on

PlanProgram = Callable[[Program], ExecutionSchedule]


class Planner:
    """From programs to prepared templates. Not thread-safe: the session's lock is held around it."""

    def __init__(
        self,
        plan: PlanProgram,
        stats: Stats,
        made: Callable[[Prepared, Program], None] = lambda _, __: None,
        exact: bool = False,
    ) -> None:
        """`made` is told of each new plan and its program; `recent` are plans that were asked for, the latest last.

        `exact`: as in `PlansByStructure`.
        """
        self.exact = exact
        self.recent: Recent = deque(maxlen=RECENT)
        self._plan = plan
        self._made = made
        self._stats = stats
        self._planned: PlansByStructure[Prepared] = PlansByStructure(exact)

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
        return make_template(
            schedule.program, nodes, schedule.replace, schedule.equal_slots, rewritten=schedule.rewritten
        )
