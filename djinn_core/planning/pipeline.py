"""The pipeline: runs the stages annotate, estimate, optimize, place and schedule in order."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import attrs

from djinn_core.errors import ConfigurationError
from djinn_core.hookspecs.optimizations import OptimizationContext
from djinn_core.hookspecs.placement_policies import PlacementContext, PlacementPolicy
from djinn_core.hookspecs.schedulers import Scheduler, SchedulingContext
from djinn_core.ir.costs import Costs
from djinn_core.ir.graph import Graph
from djinn_core.ir.plan import OptimizationPlan
from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.program import Program
from djinn_core.ir.result import STAGES, PipelineResult, Stage
from djinn_core.planning.builtins.placement import SingleDevice
from djinn_core.planning.builtins.scheduling import Sequential
from djinn_core.planning.draft import Draft, without_idle_results, without_substitutions
from djinn_core.planning.request import Plugins, Request, selected_optimizations
from djinn_core.planning.stages.annotate import NOTHING_KNOWN, Known, annotate
from djinn_core.planning.stages.estimate import estimate
from djinn_core.planning.stages.optimize import optimize, starting_plan
from djinn_core.planning.stages.place import place
from djinn_core.planning.stages.schedule import schedule

T = TypeVar("T")
P = ParamSpec("P")
Choice = TypeVar("Choice", PlacementPolicy, Scheduler)
_POLICY = SingleDevice()
_SCHEDULER = Sequential()


def plan(
    program: Program | Graph,
    plugins: Plugins,
    request: Request,
    *,
    profile: WorkloadProfile | None = None,
    known: Known = NOTHING_KNOWN,
    known_plan: OptimizationPlan | None = None,
) -> PipelineResult:
    """Run the stages over a program, up to `request.until`.

    If optimizations substitute code, the first three stages run again over the rewritten program.

    Args:
        program: the program to plan.
        plugins: patterns, cost models, optimizations, placement policies and schedulers.
        request: devices and options, such as `until`.
        profile: the program's profile, if it is known from another program of the same structure; otherwise None.
        known: lifetimes of values from earlier programs, as in `annotate`.
        known_plan: an earlier result of the optimizations, which then do not run; None to run them.

    Raises:
        ConfigurationError: no plugin offers the placement policy or the scheduler of the request.
        InvalidStage: no device can run the program.
    """
    policy = _choose("placement policy", request.placement_policy, plugins.placement_policies, _POLICY)
    scheduler = _choose("scheduler", request.scheduler, plugins.schedulers, _SCHEDULER)
    graph = program if isinstance(program, Graph) else Graph(program)
    draft = Draft(graph, request, selected_optimizations(plugins, request.exact), profile, known)
    clock, last = _StageClock(), STAGES.index(request.until)

    result = _analyse(draft, plugins, clock)
    if last < STAGES.index("optimize"):
        return result
    optimized, problem = known_plan, ""
    while optimized is None:
        optimized_plan = clock.time(
            "optimize", optimize, _optimization_context(result, draft.request), draft.optimizations
        )
        next_draft = draft.after_substitutions(result, optimized_plan)
        if isinstance(next_draft, Draft):
            draft = next_draft
            result = _analyse(draft, plugins, clock)
        else:  # no substitutions, or none could be recorded
            optimized, problem = optimized_plan, next_draft
    result = attrs.evolve(result, plan=without_substitutions(optimized, problem))
    if last >= STAGES.index("place"):
        result = _place(result, policy, draft, clock, second_pass=known_plan is None)
    if last >= STAGES.index("schedule"):
        context = _scheduling_context(result, draft)
        steps = clock.time("schedule", schedule, context, scheduler, _SCHEDULER)
        result = attrs.evolve(result, schedule=attrs.evolve(steps, rewritten=draft.rewritten))
    return result if known_plan is not None else draft.with_all_results(result, plugins)


def _analyse(draft: Draft, plugins: Plugins, clock: _StageClock) -> PipelineResult:
    graph, request = draft.graph, draft.request
    profile = draft.profile or clock.time("annotate", annotate, graph, plugins.patterns, known=draft.known)
    result = PipelineResult(
        graph, request.topology, profile, recorded_profile=draft.recorded_profile, seconds=clock.seconds
    )
    if request.until == "annotate":
        return result
    costs = clock.time("estimate", estimate, graph, plugins.cost_models, request.topology)
    return attrs.evolve(result, costs=costs)


def _place(
    result: PipelineResult, policy: PlacementPolicy, draft: Draft, clock: _StageClock, *, second_pass: bool
) -> PipelineResult:
    """Return the result with a placement. With `second_pass`, optimizations with `after_placement` then run again."""
    request = draft.request
    placement = clock.time("place", place, placement_context(result, request), policy, _POLICY)
    result = attrs.evolve(result, placement=placement)
    again = (
        [optimization for optimization in draft.optimizations if optimization.after_placement] if second_pass else []
    )
    if not again:
        return result
    first_plan = without_idle_results(_plan_of(result), again)
    context = attrs.evolve(
        _optimization_context(result, request),
        plan=first_plan,
        placement=placement,
        resident=request.resident,
        copies=request.copies,
    )
    optimized = clock.time("optimize", optimize, context, again)
    result = attrs.evolve(result, plan=optimized)
    if attrs.evolve(optimized, results=()) == attrs.evolve(first_plan, results=()):
        return result
    placement = clock.time("place", place, placement_context(result, request), policy, _POLICY)
    return attrs.evolve(result, placement=placement)


def _optimization_context(result: PipelineResult, request: Request) -> OptimizationContext:
    graph, profile = result.graph, _profile_of(result)
    return OptimizationContext(
        graph=graph,
        profile=profile,
        costs=result.costs or Costs({}),
        topology=request.topology,
        plan=starting_plan(graph, profile, request.hints),
        kept=frozenset((*graph.outputs, *graph.inputs)),
        stream=request.stream,
        margin=request.margin,
    )


def placement_context(result: PipelineResult, request: Request) -> PlacementContext:
    """Return the context of a placement policy for a result that has a plan."""
    return PlacementContext(
        graph=result.graph,
        profile=_profile_of(result),
        plan=_plan_of(result),
        costs=result.costs or Costs({}),
        topology=request.topology,
        resident=request.resident,
        copies=request.copies,
        pins=dict(request.pins),
        stream=request.stream,
        fetch=request.fetch,
        memory_limits=request.memory_limits,
        margin=request.margin,
    )


def _scheduling_context(result: PipelineResult, draft: Draft) -> SchedulingContext:
    request = draft.request
    if result.placement is None:
        raise ValueError("the result has no placement to schedule: plan until='place'")
    return SchedulingContext(
        program=draft.graph.program,
        graph=result.graph,
        plan=_plan_of(result),
        placement=result.placement,
        costs=result.costs or Costs({}),
        topology=request.topology,
        resident=request.resident,
        fetch=request.fetch,
        copies=request.copies,
        memory_limits=request.memory_limits,
        latency_target=request.latency_target,
    )


def _profile_of(result: PipelineResult) -> WorkloadProfile:
    if result.profile is None:
        raise ValueError("the result has no profile")
    return result.profile


def _plan_of(result: PipelineResult) -> OptimizationPlan:
    if result.plan is None:
        raise ValueError("the result has no plan: plan until='optimize'")
    return result.plan


class _StageClock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)

    def time(self, stage: Stage, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        start = time.perf_counter()
        result = work(*args, **options)
        self.seconds[stage] += time.perf_counter() - start
        return result


def _choose(kind: str, name: str, offered: Sequence[Choice], built_in: Choice) -> Choice:
    candidates = list(offered)
    candidates.append(built_in)
    for candidate in candidates:
        if candidate.name == name:
            return built_in if type(candidate) is type(built_in) else candidate
    names = sorted({c.name for c in candidates})
    close = difflib.get_close_matches(name, names, 1)
    guess = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigurationError(f"there is no {kind} {name!r}; available: {', '.join(names)}{guess}")
