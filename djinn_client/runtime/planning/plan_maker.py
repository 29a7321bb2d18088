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
        """Plan a program without the optimizations in `without`."""
        started = time.monotonic()
        result = self._result(program, without, "schedule")
        profile = result.recorded_profile or result.profile
        assert profile is not None
        report_planned(self._context, result, len(program), started)
        return PlannedProgram(result, profile)

    def analyse(self, prepared: PreparedTemplate, program: Program) -> WorkloadProfile:
        """Return the profile of a program that runs without a plan."""
        result = self._result(program, NOTHING_LEFT_OUT, "annotate")
        assert result.profile is not None
        self.note_plan(prepared, program, PlannedProgram(result, result.profile))
        return result.profile

    def _result(self, program: Program, without: Without, until: Stage) -> PipelineResult:
        sessions = self._context.opened
        device = sessions[0].attached.device if sessions else NOWHERE
        make = partial(plan, known=self._earlier.residency(program))
        return plan_program(program, *self._context.configured(), device, until, without=without, make=make)

    def note_plan(self, prepared: PreparedTemplate, program: Program, planned: PlannedProgram) -> None:
        """Record facts about a template's values, from a plan or an analysis."""
        self._earlier.note_plan(prepared, program, planned.profile.residency, planned.profile.lineage)
        if self._context.opened:
            prepared.hints = hints_for(prepared, program, planned.profile, planned.result)


def growth_intolerant_plugins_in(registry: Registry, settings: Settings, devices: int) -> tuple[str, ...]:
    """Return the names of plugins in use that require a new plan if sizes change much, for plans on `devices` devices."""
    policy = policy_for(settings, registry.placement_policies, devices)
    return growth_intolerant_plugins(registry, exact=settings.exact, policy=policy, scheduler=settings.scheduler)


def judge_among(optimizations: Iterable[Optimization]) -> Judge | None:
    """Return the first optimization that is a judge, or None."""
    return next((o for o in optimizations if isinstance(o, Judge)), None)


def begin_planning(context: ClientContext, devices: int, recent: Recent) -> Planning:
    """Return planning functions for a session on `devices` devices, without facts about earlier programs."""
    registry, settings = context.configured()
    plans = PlanMaker(context, recent)
    context.growth_intolerant_plugins = growth_intolerant_plugins_in(registry, settings, devices)
    unsure = frozenset(o.name for o in registry.optimizations if not o.tolerates_growth)
    factor = NARROW_FACTOR if context.growth_intolerant_plugins else FACTOR
    judge = judge_among(registry.optimizations)
    return Planning(plans.plan, plans.analyse, plans.note_plan, factor, judge, unsure)


def report_planned(context: ClientContext, result: PipelineResult, instructions: int, started: float) -> None:
    """Emit the event `planned`, and add the plan to active recordings (`record_plans`).

    `instructions`: number of instructions of the program. `started`: time on the monotonic clock at which planning began.
    """
    context.observers.emit("planned", instructions=instructions, duration=time.monotonic() - started)
    for recording in context.recordings:
        recording.append(result)


def hints_for(
    prepared: PreparedTemplate, program: Program, profile: WorkloadProfile, result: PipelineResult
) -> ValueHints:
    """Return the kinds of a template's inputs and outputs. A value of unknown kind counts as an activation."""
    kinds, activation = profile.residency, DataResidency.EPHEMERAL_ACTIVATION
    letters = [_LETTERS[kinds.get(value) or activation] for value in dict.fromkeys(program.operands)]

    def letters_at(positions: Words) -> bytes:
        return "".join([letters[p] if p < len(letters) else _LETTERS[activation] for p in positions.tolist()]).encode()

    decisions = tuple(islice(_decisions(len(program), result), limits.DECISIONS))
    return ValueHints(
        prepared.digest, profile.phase.value, letters_at(prepared.inputs), letters_at(prepared.outputs), decisions
    )


def _decisions(ops: int, result: PipelineResult) -> Iterator[str]:
    """Yield the decisions of a plan with reasons, one per line: the two most frequent placements, then optimizations.

    Applied optimizations precede other optimizations. `ops`: number of ops of the program.
    """
    placements = result.placement.decisions if result.placement is not None else ()
    counts = Counter((decision.device, decision.reason) for decision in placements)
    for (device, reason), count in counts.most_common(2):
        yield _line(f"{count} of {ops} ops on {device}: {reason}")
    results = result.plan.results if result.plan is not None else ()
    for outcome in sorted(results, key=lambda outcome: not outcome.applied):
        yield _line(f"{outcome.optimization} {'applied' if outcome.applied else 'not applied'}: {outcome.reason}")


def _line(text: str) -> str:
    return printable(" ".join(text.split()))[:_LINE]
