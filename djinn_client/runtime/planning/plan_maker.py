"""Planning of the open session, with facts about earlier programs. Imported when the first program is planned."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Final

from djinn_client.runtime.context import ClientContext
from djinn_client.runtime.planning.ab_tests import Without
from djinn_client.runtime.planning.constraints import policy_for
from djinn_client.runtime.planning.planner import PlannedProgram, Planning, Recent
from djinn_client.runtime.planning.residency_history import ResidencyHistory
from djinn_client.runtime.planning.run_pipeline import NOTHING_LEFT_OUT, NOWHERE, plan_program
from djinn_client.runtime.planning.size_range import FACTOR, NARROW_FACTOR
from djinn_client.runtime.sending.template import PreparedTemplate
from djinn_core.hookspecs.optimizations import Judge, Optimization
from djinn_core.ir.profile import DataResidency, WorkloadProfile
from djinn_core.ir.program import Program
from djinn_core.ir.result import PipelineResult, Stage
from djinn_core.ir.slot_arrays import Words
from djinn_core.planning.pipeline import plan
from djinn_core.planning.request import growth_intolerant_plugins
from djinn_core.registry.registry import Registry
from djinn_core.settings import Settings
from djinn_core.system.printable import printable
from djinn_core.wire import limits
from djinn_core.wire.messages import ValueHints

_LETTERS: Final = MappingProxyType({
    DataResidency.PERSISTENT_WEIGHT: "w",
    DataResidency.STATEFUL_KV_CACHE: "k",
    DataResidency.GRADIENT: "g",
    DataResidency.OPTIMIZER_STATE: "o",
    DataResidency.INPUT: "i",
    DataResidency.EPHEMERAL_ACTIVATION: "a",
})  # fmt: skip

_LINE: Final = 200  # character limit of a decision


class PlanMaker:
    """Plan the programs of a session with one executor, using facts about earlier programs."""

    def __init__(self, context: ClientContext, recent: Recent) -> None:
        """Begin without facts. `recent`: as in `Planner`."""
        self._context = context
        self._earlier = ResidencyHistory(recent)

    def plan(self, program: Program, without: Without = NOTHING_LEFT_OUT) -> PlannedProgram:
        """Plan a program."""
        started = time.monotonic()
        result = self._result(program, without, "schedule")
        about = result.recorded_profile or result.profile
        assert about is not None
        report_planned(self._context, result, len(program), started)
        return PlannedProgram(result, about)

    def analyse(self, prepared: PreparedTemplate, program: Program) -> WorkloadProfile:
        """Return the profile of a program that runs without a plan."""
        result = self._result(program, NOTHING_LEFT_OUT, "annotate")
        assert result.profile is not None
        self.made(prepared, program, PlannedProgram(result, result.profile))
        return result.profile

    def _result(self, program: Program, without: Without, until: Stage) -> PipelineResult:
        opened = self._context.opened
        device = opened[0].attached.device if opened else NOWHERE
        make = partial(plan, known=self._earlier.residency(program))
        return plan_program(program, *self._context.configured(), device, until, without=without, make=make)

    def made(self, prepared: PreparedTemplate, program: Program, planned: PlannedProgram) -> None:
        """Record facts about a template's values, from a plan or an analysis."""
        self._earlier.planned(prepared, program, planned.profile.residency, planned.profile.lineage)
        if self._context.opened:
            prepared.hints = hints_for(prepared, program, planned.profile, planned.result)


def growth_intolerant_plugins_in(registry: Registry, settings: Settings, devices: int) -> tuple[str, ...]:
    """Return the active plugins for programs on `devices` devices that require a new plan when sizes change much."""
    policy = policy_for(settings, registry.placement_policies, devices)
    return growth_intolerant_plugins(registry, exact=settings.exact, policy=policy, scheduler=settings.scheduler)


def judge_among(optimizations: Iterable[Optimization]) -> Judge | None:
    """Return the first optimization that is a judge."""
    return next((o for o in optimizations if isinstance(o, Judge)), None)


def begin_planning(context: ClientContext, devices: int, recent: Recent) -> Planning:
    """Begin the planning for a session on `devices` devices, without facts about earlier programs."""
    registry, settings = context.configured()
    plans = PlanMaker(context, recent)
    context.growth_intolerant_plugins = growth_intolerant_plugins_in(registry, settings, devices)
    unsure = frozenset(o.name for o in registry.optimizations if not o.tolerates_growth)
    factor = NARROW_FACTOR if context.growth_intolerant_plugins else FACTOR
    judge = judge_among(registry.optimizations)
    return Planning(plans.plan, plans.analyse, plans.made, factor, judge, unsure)


def report_planned(context: ClientContext, result: PipelineResult, instructions: int, started: float) -> None:
    """Notify observers and plan collectors of a plan. `started`: time at which planning began."""
    context.observers.emit("planned", instructions=instructions, duration=time.monotonic() - started)
    for recording in context.recordings:
        recording.append(result)


def hints_for(
    prepared: PreparedTemplate, program: Program, profile: WorkloadProfile, result: PipelineResult
) -> ValueHints:
    """Return the kinds of a template's inputs and outputs. A value of unknown kind counts as an activation."""
    kinds, activation = profile.residency, DataResidency.EPHEMERAL_ACTIVATION
    letters = [_LETTERS[kinds.get(value) or activation] for value in dict.fromkeys(program.operands)]

    def taken(positions: Words) -> bytes:
        return "".join([letters[p] if p < len(letters) else _LETTERS[activation] for p in positions.tolist()]).encode()

    decisions = tuple(islice(_decisions(len(program), result), limits.DECISIONS))
    return ValueHints(prepared.digest, profile.phase.value, taken(prepared.inputs), taken(prepared.outputs), decisions)


def _decisions(ops: int, result: PipelineResult) -> Iterator[str]:
    """Yield the decisions of a plan with reasons, one per line: placements, applied optimizations, then other optimizations."""
    placed = result.placement.decisions if result.placement is not None else ()
    where = Counter((one.device, one.reason) for one in placed)
    for (device, reason), count in where.most_common(2):
        yield _line(f"{count} of {ops} ops on {device}: {reason}")
    outcomes = result.plan.results if result.plan is not None else ()
    for one in sorted(outcomes, key=lambda one: not one.applied):
        yield _line(f"{one.optimization} {'applied' if one.applied else 'left out'}: {one.reason}")


def _line(text: str) -> str:
    return printable(" ".join(text.split()))[:_LINE]
