"""Rebinding of a cached plan to another program with equal nodes, but different values and scalars."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeVar

import attrs

from djinn_core.ir.graph import Graph
from djinn_core.ir.handles import storage_of
from djinn_core.ir.placement import Placement
from djinn_core.ir.plan import OptimizationPlan, OptimizationResult
from djinn_core.ir.profile import PatternMatch, WorkloadProfile
from djinn_core.ir.result import PipelineResult
from djinn_core.ir.schedule import ExecutionSchedule, Fetch, Free, Receive, Run, Send, Step, Upload

T = TypeVar("T")
Names = Mapping[int, int]


class ReboundResult(PipelineResult):
    """A planning result with the value ids of another graph. Nodes keep their ids, and `seconds` is empty.

    Each part is renamed when it is first accessed, so that a cache hit costs next to nothing.
    """

    _original: PipelineResult
    _values: tuple[tuple[int, ...], tuple[int, ...]]

    @cached_property
    def _names(self) -> Names:
        return dict(zip(*self._values, strict=True))

    @cached_property
    def profile(self) -> WorkloadProfile | None:
        """Return the workload profile of the program."""
        profile = self._original.profile
        return profile and rebind_profile(profile, self._names)

    @cached_property
    def plan(self) -> OptimizationPlan | None:
        """Return the optimization plan of the program."""
        plan = self._original.plan
        return plan and rebind_plan(plan, self._names)

    @cached_property
    def placement(self) -> Placement | None:
        """Return the placement of the program."""
        placement = self._original.placement
        return placement and _placement(placement, self._names)

    @cached_property
    def schedule(self) -> ExecutionSchedule | None:
        """Return the schedule of the program."""
        schedule = self._original.schedule
        return schedule and rebind_schedule(schedule, self.graph, self._names)


def rebind(result: PipelineResult, graph: Graph, old: tuple[int, ...], new: tuple[int, ...]) -> PipelineResult:
    """Return `result` with each value of `old` renamed to the value at the same position of `new`.

    Each part is renamed at first access.
    """
    rebound = ReboundResult.__new__(ReboundResult)
    rebound.__dict__.update(_original=result, _values=(old, new))
    unchanged = {name: getattr(result, name) for name in ("topology", "costs", "recorded_profile")}
    for name, part in ({"graph": graph, "seconds": {}} | unchanged).items():
        object.__setattr__(rebound, name, part)
    return rebound


def rebind_profile(profile: WorkloadProfile, names: Names) -> WorkloadProfile:
    """Return `profile` with renamed values."""
    return attrs.evolve(
        profile,
        residency=_rename_keys(profile.residency, names),
        patterns=tuple(_match(m, names) for m in profile.patterns),
    )


def _match(match: PatternMatch, names: Names) -> PatternMatch:
    return attrs.evolve(
        match,
        residency=_rename_keys(match.residency, names),
        hints=_rename_nested(match.hints, names),
        details=_rename_nested(match.details, names),
    )


def rebind_plan(plan: OptimizationPlan, names: Names) -> OptimizationPlan:
    """Return `plan` with renamed values."""
    return attrs.evolve(
        plan,
        replace=_rename_both(plan.replace, names),
        results=tuple(_result(r, names) for r in plan.results),
        hints=_rename_nested(plan.hints, names),
    )


def _result(result: OptimizationResult, names: Names) -> OptimizationResult:
    rewrite = result.rewrite
    renamed = attrs.evolve(
        rewrite, replace=_rename_both(rewrite.replace, names), hints=_rename_nested(rewrite.hints, names)
    )
    return attrs.evolve(result, rewrite=attrs.evolve(renamed, substitutions=()))


def _placement(placement: Placement, names: Names) -> Placement:
    return attrs.evolve(
        placement, values=_rename_keys(placement.values, names), copies=_rename_keys(placement.copies, names)
    )


def rebind_schedule(schedule: ExecutionSchedule, graph: Any, names: Names) -> ExecutionSchedule:
    """Return `schedule` for `graph`, with renamed values."""
    return attrs.evolve(
        schedule,
        program=graph.program,
        steps={device: tuple([_step(s, names) for s in steps]) for device, steps in schedule.steps.items()},
        replace=_rename_both(schedule.replace, names),
    )


def _step(step: Step, names: Names) -> Step:
    match step:
        case Run():
            return step
        case Free(values):
            return Free(tuple([names[v] for v in values]))
        case Send(value, target):
            return Send(names[value], target)
        case Receive(value, source):
            return Receive(names[value], source)
        case Upload(value):
            return Upload(names[value])
        case Fetch(value):
            return Fetch(names[value])


def _rename_keys(table: Mapping[int, T], names: Names) -> dict[int, T]:
    return {names[v]: entry for v, entry in table.items()}


def _rename_both(table: Mapping[int, int], names: Names) -> dict[int, int]:
    return {names[v]: names[w] for v, w in table.items()}


def _rename_nested(facts: Any, names: Names) -> Any:
    """Return nested data with renamed value ids. Small integers are counts, so they are not renamed."""
    if isinstance(facts, bool):
        return facts
    if isinstance(facts, int):
        return names.get(facts, facts) if storage_of(facts) else facts
    if isinstance(facts, Mapping):
        return {_rename_nested(k, names): _rename_nested(v, names) for k, v in facts.items()}
    if isinstance(facts, list | tuple | set | frozenset):
        return type(facts)([_rename_nested(f, names) for f in facts])
    return facts
