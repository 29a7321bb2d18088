"""Makes the plans of the open session, with what is known of the programs before. Imported when the first program is planned."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

from djinn_client.runtime.context import ClientContext
from djinn_client.runtime.planning.ab_tests import Without
from djinn_client.runtime.planning.constraints import policy_for
from djinn_client.runtime.planning.disk_plan_cache import DiskPlanCache, disk_plan, plans_file
from djinn_client.runtime.planning.placement_trials import PlacementTrials
from djinn_client.runtime.planning.plan_cache import PlanLookup
from djinn_client.runtime.planning.planner import PlannedProgram, Planner, Planning, Recent
from djinn_client.runtime.planning.program_index import KnownPrograms
from djinn_client.runtime.planning.residency_history import ResidencyHistory
from djinn_client.runtime.planning.run_pipeline import NOTHING_LEFT_OUT, NOWHERE, plan_for_pool, plan_program
from djinn_client.runtime.planning.size_range import FACTOR, NARROW_FACTOR
from djinn_client.runtime.planning.value_hints import hints_for, hints_from, kinds_from, letters_of
from djinn_client.runtime.pool.pool_planner import PlanningInputs
from djinn_client.runtime.sending.template import PreparedTemplate
from djinn_core.hookspecs.optimizations import Judge, Optimization
from djinn_core.ir.costs import NetworkTopology
from djinn_core.ir.graph import ProgramGraph
from djinn_core.ir.program import Program
from djinn_core.ir.result import PipelineResult
from djinn_core.planning.pipeline import asked_by_size, plan
from djinn_core.registry.registry import Registry
from djinn_core.settings import Settings


class PlanMaker:
    """Plans the programs of a session with one executor, with what is known of those that came before."""

    def __init__(self, context: ClientContext, recent: Recent) -> None:
        """`recent`: as the planner has it."""
        self._context = context
        self._whole_programs = KnownPrograms()
        self._earlier = ResidencyHistory(recent)
        self._disk_plans: DiskPlanCache | None = None
        self._asked_for_disk_cache = False

    def plan(self, program: Program, without: Without = NOTHING_LEFT_OUT) -> PlannedProgram:
        """Plan a program, or a piece of one."""
        started = time.monotonic()
        context = self._context
        piece = self._whole_programs.piece(program)
        profile = piece[0] if piece is not None else None
        known = self._earlier.residency(program) if piece is None else {}
        device = context.opened[0].attached.device if context.opened else NOWHERE
        make = partial(plan, profile=profile, known=known)
        result = plan_program(program, *context.configured(), device, without=without, make=make)
        about = result.recorded or result.profile
        assert about is not None
        if piece is None:
            self._whole_programs.remember(program, about)
        _tell_planned(context, result, len(program), started)
        return PlannedProgram(result, about, about if piece is None else piece[1])

    def made(self, prepared: PreparedTemplate, program: Program, planned: PlannedProgram) -> None:
        """A template was made of a plan."""
        self._earlier.planned(prepared, program, planned.profile.residency, planned.profile.lineage)
        if self._context.opened:
            prepared.hints = hints_for(prepared, program, planned.profile, planned.result)

    def restore(self, program: Program, found: PlanLookup[PreparedTemplate]) -> PreparedTemplate | None:
        """As `PlanKeeper.restore`."""
        kept = self._disk_cache()
        restored = kept.find(program, found) if kept is not None and not self._wants_plans() else None
        if restored is None:
            return None
        prepared, plan = restored
        try:
            self._earlier.planned(prepared, program, kinds_from(program, plan.letters))
        except KeyError:  # no letters of ours
            return None
        prepared.hints = hints_from(prepared, plan.phase, plan.letters, plan.decisions)
        prepared.restored = program
        return prepared

    def keep(
        self, program: Program, found: PlanLookup[PreparedTemplate], prepared: PreparedTemplate, planned: PlannedProgram
    ) -> None:
        """As `PlanKeeper.keep`."""
        kept = self._disk_cache()
        if kept is None:
            return
        plan = disk_plan(program, found, prepared, planned.result.schedule, letters_of(program, planned.profile))
        if plan is not None:
            kept.keep(program, found, plan)

    def save(self) -> None:
        """Write the plans that later processes may use."""
        if self._disk_plans is not None:
            self._disk_plans.save()

    def _wants_plans(self) -> bool:
        """True where plans are to be made, to be shown or because a plugin is being written."""
        settings = self._context.settings
        assert settings is not None
        return bool(self._context.recordings) or settings.plan_first_runs

    def _disk_cache(self) -> DiskPlanCache | None:
        """The plans of earlier processes; None where there are none and none are kept."""
        if not self._asked_for_disk_cache and self._context.opened:
            self._asked_for_disk_cache = True
            registry, settings = self._context.configured()
            device = self._context.opened[0].attached.device
            factor = NARROW_FACTOR if self._context.asked_by_size else FACTOR
            try:
                file = plans_file(registry, settings, device, factor)
            except OSError:  # an editor is just writing a file of a working copy
                file = None
            self._disk_plans = DiskPlanCache(file) if file is not None else None
        return self._disk_plans


def asked_by_size_in(registry: Registry, settings: Settings, devices: int) -> tuple[str, ...]:
    """Plugins in use, for programs on `devices` devices, that require replanning when sizes change much."""
    policy = policy_for(settings, registry.placement_policies, devices)
    return asked_by_size(registry, exact=settings.exact, policy=policy, scheduler=settings.scheduler)


def judge_among(optimizations: Iterable[Optimization]) -> Judge | None:
    """Return the first of the optimizations that is a judge."""
    return next((o for o in optimizations if isinstance(o, Judge)), None)


def begin_planning(context: ClientContext, devices: int, recent: Recent) -> Planning:
    """Planning of the programs of a session on `devices` devices; what is known of them and of their values begins again with it."""
    registry, settings = context.configured()
    plans = context.plans = PlanMaker(context, recent)
    context.asked_by_size = asked_by_size_in(registry, settings, devices)
    unsure = frozenset(o.name for o in registry.optimizations if not o.tolerates_growth)
    factor = NARROW_FACTOR if context.asked_by_size else FACTOR
    keeper = plans if devices == 1 else None
    judge = judge_among(registry.optimizations)
    return Planning(plans.plan, plans.made, keeper, factor, judge, unsure)


def placement_trials(context: ClientContext, planner: Planner, devices: int) -> PlacementTrials | None:
    """Trials of placements on several devices; None where no plugin judges them."""
    registry, settings = context.configured()
    judge = judge_among(registry.optimizations)
    if judge is None:
        return None
    name = policy_for(settings, registry.placement_policies, devices)
    return PlacementTrials(judge, name, context.stats, planner.verdicts)


def plan_in_pool(
    context: ClientContext, graph: ProgramGraph, where: PlanningInputs, topology: NetworkTopology
) -> PipelineResult:
    """The plan of a program over several devices, or of a piece of one."""
    started = time.monotonic()
    registry, settings = context.configured()
    known = (
        where.resident,
        where.copies,
        where.stream,
        where.derived,
        where.occupied,
        where.known,
        where.margin,
        where.piece,
    )
    result = plan_for_pool(graph, registry, settings, topology, *known)
    _tell_planned(context, result, len(graph.program), started)
    return result


def _tell_planned(context: ClientContext, result: PipelineResult, instructions: int, started: float) -> None:
    context.observers.tell("planned", instructions=instructions, duration=time.monotonic() - started)
    for recording in context.recordings:
        recording.append(result)
