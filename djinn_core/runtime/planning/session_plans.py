"""Plans of the open session, and what is known of the programs that were planned in it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from djinn_core.config import Settings
from djinn_core.hookspecs.growth import tolerates_growth
from djinn_core.interception.recording.recorder import recorders
from djinn_core.interception.runtime_interface import port
from djinn_core.ir.costs import NetworkTopology
from djinn_core.ir.graph import ProgramGraph
from djinn_core.ir.program import Program
from djinn_core.ir.result import PipelineResult
from djinn_core.pipeline import asked_by_size, plan
from djinn_core.plugins.registry import Registry
from djinn_core.runtime.context import ClientContext
from djinn_core.runtime.planning.ab_tests import Without, judge_among
from djinn_core.runtime.planning.constraints import policy_for
from djinn_core.runtime.planning.kept_plans import KeptPlans, kept_plan, plans_file
from djinn_core.runtime.planning.placement_trials import PlacementTrials, placement_judge_among
from djinn_core.runtime.planning.planner import PlannedProgram, Planner, PlanningRules
from djinn_core.runtime.planning.planning import NOTHING_LEFT_OUT, NOWHERE, plan_for_pool, plan_program
from djinn_core.runtime.planning.plans import Found
from djinn_core.runtime.planning.program_index import KnownPrograms
from djinn_core.runtime.planning.residency_history import RECENT, Recent, ResidencyHistory
from djinn_core.runtime.planning.size_range import FACTOR, NARROW_FACTOR
from djinn_core.runtime.planning.value_hints import hints_for, hints_from, kinds_from, letters_of
from djinn_core.runtime.pool.planner import Whereabouts
from djinn_core.runtime.sending.template import Prepared


class SessionPlans:
    """Plans the programs of a session with one executor, with what is known of those that came before."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._wholes = KnownPrograms()
        self.recent: Recent = deque(maxlen=RECENT)
        self._earlier = ResidencyHistory(self.recent)
        self._kept: KeptPlans | None = None
        self._asked_for_kept = False

    def plan(self, program: Program, without: Without = NOTHING_LEFT_OUT) -> PlannedProgram:
        """Plan a program, or a piece of one."""
        started = time.monotonic()
        context = self._context
        piece = self._wholes.piece(program)
        profile = piece[0] if piece is not None else None
        known = self._earlier.residency(program) if piece is None else {}
        device = context.opened[0].attached.device if context.opened else NOWHERE
        make = partial(plan, profile=profile, known=known)
        result = plan_program(program, *context.configured(), device, without=without, make=make)
        about = result.recorded or result.profile
        assert about is not None
        if piece is None:
            self._wholes.remember(program, about)
        _tell_planned(context, result, len(program), started)
        return PlannedProgram(result, about, about if piece is None else piece[1])

    def needs_plan(self) -> bool:
        """True where even a program that may not come again has to be planned: for its values to fit, or to be shown."""
        context = self._context
        settings = context.settings
        assert settings is not None
        hinted = bool(context.opened and context.opened[0].attached.device.spill)  # its evictions follow what plans say
        return settings.plan_first_runs or bool(settings.memory_limits or context.recordings) or hinted

    def made(self, prepared: Prepared, program: Program, planned: PlannedProgram) -> None:
        """A template was made of a plan."""
        self._earlier.planned(prepared, program, planned.profile.residency, planned.profile.lineage)
        if self._context.opened:
            prepared.hints = hints_for(prepared, program, planned.profile, planned.result)

    def restore(self, program: Program, found: Found[Prepared]) -> Prepared | None:
        """As `PlanKeeper.restore`."""
        kept = self._kept_plans()
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

    def keep(self, program: Program, found: Found[Prepared], prepared: Prepared, planned: PlannedProgram) -> None:
        """As `PlanKeeper.keep`."""
        kept = self._kept_plans()
        if kept is None:
            return
        plan = kept_plan(program, found, prepared, planned.result.schedule, letters_of(program, planned.profile))
        if plan is not None:
            kept.keep(program, found, plan)

    def save(self) -> None:
        """Write what is kept."""
        if self._kept is not None:
            self._kept.save()

    def _wants_plans(self) -> bool:
        """True where plans are to be made, to be shown or because a plugin is being written."""
        settings = self._context.settings
        assert settings is not None
        return bool(self._context.recordings) or settings.plan_first_runs

    def _kept_plans(self) -> KeptPlans | None:
        """The plans of earlier processes; None where there are none and none are kept."""
        if not self._asked_for_kept and self._context.opened:
            self._asked_for_kept = True
            registry, settings = self._context.configured()
            device = self._context.opened[0].attached.device
            factor = NARROW_FACTOR if self._context.asked_by_size else FACTOR
            try:
                file = plans_file(registry, settings, device, factor)
            except OSError:  # an editor is just writing a file of a working copy
                file = None
            self._kept = KeptPlans(file) if file is not None else None
        return self._kept


def asked_by_size_in(registry: Registry, settings: Settings, devices: int) -> tuple[str, ...]:
    """Plugins in use, for programs on `devices` devices, that require replanning when sizes change much."""
    policy = policy_for(settings, registry.placement_policies, devices)
    return asked_by_size(registry, exact=settings.exact, policy=policy, scheduler=settings.scheduler)


def new_planner(context: ClientContext, devices: int) -> Planner:
    """The planner of a session on `devices` devices; what is known of programs and of their values begins again with it."""
    plans = SessionPlans(context)
    planner = Planner(
        plans.plan,
        context.stats,
        plans.made,
        partial(_rules, context, devices),
        plans.recent,
        plans.needs_plan,
        plans if devices == 1 else None,
    )
    save_plans(context)
    context.plans, context.asked_by_size = plans, ()
    if devices > 1:
        _try_placements(context, planner, devices)
    if context.registry is not None and not context.registry.later:
        planner.learn_rules()
    context.planner = planner
    return planner


def _rules(context: ClientContext, devices: int) -> PlanningRules:
    """What plans of a session on `devices` devices depend on, by the plugins in use."""
    registry, settings = context.configured()
    context.asked_by_size = asked_by_size_in(registry, settings, devices)
    unsure = frozenset(o.name for o in registry.optimizations if not tolerates_growth(o))
    factor = NARROW_FACTOR if context.asked_by_size else FACTOR
    return PlanningRules(factor, judge_among(registry.optimizations), unsure)


def _try_placements(context: ClientContext, planner: Planner, devices: int) -> None:
    """Have placements on several devices tried, unless a policy was named, which is followed."""
    registry, settings = context.configured()
    if settings.placement_policy:
        return
    planner.learns_margin = True
    if (placements := placement_judge_among(registry.optimizations)) is not None:
        name = policy_for(settings, registry.placement_policies, devices)
        planner.placements = PlacementTrials(placements, name, context.stats, planner.verdicts)


def save_plans(context: ClientContext) -> None:
    """Write the plans of the session that is open, or has just ended, for later processes."""
    if context.plans is not None:
        with recorders.sending:
            context.plans.save()


def plan_anew(context: ClientContext) -> None:
    """Forget the plans of the open session: settings or plugins have changed that they depend on."""
    with recorders.sending:
        planner = new_planner(context, max(1, len(context.opened)))
        if context.session is not None:
            context.session.plan_by(planner)


def switched_off(context: ClientContext, program: Program | ProgramGraph) -> Without:
    """Optimizations that were found not to pay for such a program in this session, each with the reason."""
    return context.planner.verdicts.about(program) if context.planner is not None else NOTHING_LEFT_OUT


def plan_whole(
    context: ClientContext, graph: ProgramGraph, where: Whereabouts, topology: NetworkTopology
) -> PipelineResult:
    """The plan of a whole program over several devices."""
    started = time.monotonic()
    registry, settings = context.configured()
    known = (where.resident, where.copies, where.stream, where.derived, where.occupied, where.known, where.margin)
    result = plan_for_pool(graph, registry, settings, topology, *known)
    _tell_planned(context, result, len(graph.program), started)
    return result


def _tell_planned(context: ClientContext, result: PipelineResult, instructions: int, started: float) -> None:
    context.observers.tell("planned", instructions=instructions, duration=time.monotonic() - started)
    for recording in context.recordings:
        recording.append(result)


@contextmanager
def record_plans(context: ClientContext) -> Iterator[list[PipelineResult]]:
    """Collects the result of every plan that is made meanwhile, of programs as they are and not in pieces."""
    recording: list[PipelineResult] = []
    context.recordings.append(recording)
    try:
        with whole_programs():
            yield recording
    finally:
        context.recordings.remove(recording)


@contextmanager
def whole_programs() -> Iterator[None]:
    """Send programs whole inside the block, and not in pieces while they are recorded."""
    port.whole_programs += 1
    try:
        yield
    finally:
        port.whole_programs -= 1
