"""Plans each new program for the executors of a pool, and finds the plan again while things are where they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from djinn_core.ir.graph import ProgramGraph
from djinn_core.ir.program import Program
from djinn_core.ir.result import PipelineResult
from djinn_core.ir.values import storage_of
from djinn_core.runtime.plans import PlansByStructure
from djinn_core.runtime.pool.building import Planned, build_plan, resident
from djinn_core.runtime.pool.parts import PooledPlan
from djinn_core.runtime.pool.residency import Residency
from djinn_core.runtime.stats import Stats

VARIANTS_LIMIT = 16  # plans of one structure that differ in where things are, and in scalars


@attrs.frozen
class Whereabouts:
    """Where the inputs of a program are, by device id: their memory, and copies of them."""

    resident: Mapping[int, str]
    copies: Mapping[int, tuple[str, ...]]


PlanForPool = Callable[[ProgramGraph, Whereabouts], PipelineResult]


class PoolPlanner:
    """From programs to parts. Not thread-safe: the recorders' lock is held around it."""

    def __init__(
        self, plan: PlanForPool, devices: tuple[str, ...], stats: Stats, residency: Residency, exact: bool = False
    ) -> None:
        """`devices`: ids of the executors' devices, in the order of their numbers. `exact`: as in `PlansByStructure`."""
        self._plan = plan
        self._devices = devices
        self._stats = stats
        self._residency = residency
        self._plans: PlansByStructure[PooledPlan] = PlansByStructure(exact)
        self.random: int | None = None

    def prepare(self, program: Program) -> tuple[PooledPlan, tuple[int, ...]]:
        """The plan of a program, and its values by first appearance."""
        variants, values = self._plans.find(program)
        for plan in variants:
            if plan.holds_for(program, values, self._residency, self.random):
                self._stats.plans_reused += 1
                return plan, values
        self._stats.plans_made += 1
        plan = self._make(program)
        variants.append(plan)
        del variants[:-VARIANTS_LIMIT]
        return plan, values

    def _make(self, program: Program) -> PooledPlan:
        graph = ProgramGraph(program)
        names, residency = self._devices, self._residency
        homes = resident(program, graph, residency, self.random)
        held = {v: residency.copies(v) for v in graph.inputs}
        copies = {v: tuple(names[e] for e in sorted(holders)) for v, holders in held.items() if holders}
        result = self._plan(graph, Whereabouts({v: names[e] for v, e in homes.items()}, copies))
        assert result.schedule is not None
        assert result.placement is not None
        executors = {name: number for number, name in enumerate(names)}
        placed = {value: executors[device] for value, device in result.placement.values.items()}
        return build_plan(Planned(graph, placed, executors, result.schedule), residency, self.random)

    def home(self, value: int) -> int | None:
        """The executor that has a value's memory."""
        return self._residency.homes.get(storage_of(value))
