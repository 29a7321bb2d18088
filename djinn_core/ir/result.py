"""Pipeline result of one program: the result of every stage that ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from djinn_core.ir.costs import Costs, NetworkTopology
from djinn_core.ir.graph import Graph
from djinn_core.ir.placement import Placement
from djinn_core.ir.plan import OptimizationPlan
from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.schedule import ExecutionSchedule
from djinn_core.ir.short_repr import ShortRepr

Stage = Literal["annotate", "estimate", "optimize", "place", "schedule"]
STAGES: tuple[Stage, ...] = ("annotate", "estimate", "optimize", "place", "schedule")


@attrs.frozen
class TrialTimes:
    """Median run times of a program in the session's trials, in seconds.

    Attributes:
        before: median seconds without an optimization, or on one executor.
        after: median seconds with it, or over several executors.
        runs: number of runs before or after, whichever is smaller.
    """

    before: float
    after: float
    runs: int

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float]) -> TrialTimes:
        """Return the medians of both lists of run times."""
        from statistics import median  # imported here because few programs are tried

        return cls(median(before), median(after), min(len(before), len(after)))


@attrs.frozen(repr=False)
class PipelineResult(ShortRepr):
    """Results of the planning stages, in order; None for stages that did not run.

    Attributes:
        graph: the planned graph.
        profile: result of the stage `annotate`.
        costs: result of the stage `estimate`.
        plan: result of the stage `optimize`.
        placement: result of the stage `place`.
        schedule: result of the stage `schedule`.
        recorded_profile: profile of the recorded program if optimizations substituted code; otherwise None.
        topology: the devices of the plan.
        seconds: duration of each stage, by name; empty if the result came from the cache.
        trial_times: times from the session's trials of the program, by name of the optimization or placement policy.
    """

    graph: Graph
    topology: NetworkTopology
    profile: WorkloadProfile | None = None
    recorded_profile: WorkloadProfile | None = None
    costs: Costs | None = None
    plan: OptimizationPlan | None = None
    placement: Placement | None = None
    schedule: ExecutionSchedule | None = None
    seconds: Mapping[str, float] = attrs.field(factory=dict)
    trial_times: Mapping[str, TrialTimes] = attrs.field(factory=dict)


def without_later_stages(result: PipelineResult, stage: str) -> PipelineResult:
    """Return `result` without the results of the stages after `stage`.

    Raises:
        ValueError: there is no such stage.
    """
    later = STAGES[STAGES.index(stage) + 1 :]
    parts = {"estimate": "costs", "optimize": "plan", "place": "placement", "schedule": "schedule"}
    blank: dict[str, Any] = {parts[name]: None for name in later}
    seconds = {name: duration for name, duration in result.seconds.items() if name not in later}
    return attrs.evolve(result, seconds=seconds, **blank)
