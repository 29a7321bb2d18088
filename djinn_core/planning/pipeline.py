"""The order of the stages."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import attrs

from djinn_core.errors import ConfigurationError
from djinn_core.hookspecs.cost_models import CostModel
from djinn_core.hookspecs.optimizations import Optimization, OptimizationContext
from djinn_core.hookspecs.patterns import Pattern
from djinn_core.hookspecs.placement_policies import PlacementContext, PlacementPolicy
from djinn_core.hookspecs.schedulers import Scheduler, SchedulingContext
from djinn_core.ir.costs import Costs, NetworkTopology
from djinn_core.ir.graph import Graph, ProgramGraph
from djinn_core.ir.placement import MARGIN, Placement
from djinn_core.ir.plan import OptimizationPlan, OptimizationResult
from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.program import Program
from djinn_core.ir.rebinding import rebind, rebind_plan, rebind_profile
from djinn_core.ir.result import STAGES, PipelineResult, Stage
from djinn_core.ir.stream import ALONE, Stream
from djinn_core.ir.substitution import Derived, RewrittenProgram, composed, groups_after, not_derived
from djinn_core.planning.builtins.placement import SingleDevice
from djinn_core.planning.builtins.scheduling import Sequential
from djinn_core.planning.stages.analysis_cache import AnalysisCache, CachedAnalysis
from djinn_core.planning.stages.annotate import NOTHING_KNOWN, Known, annotate
from djinn_core.planning.stages.estimate import estimate
from djinn_core.planning.stages.fingerprint import fingerprint
from djinn_core.planning.stages.optimize import optimize, starting_plan
from djinn_core.planning.stages.place import place
from djinn_core.planning.stages.placement_fit import shortages
from djinn_core.planning.stages.schedule import schedule
from djinn_core.planning.substituting import Rewrite, substitute

T = TypeVar("T")


class Plugins(Protocol):
    """The part of the registry that planning needs."""

    @property
    def patterns(self) -> Sequence[Pattern]:
        """Asked by `annotate`."""

    @property
    def cost_models(self) -> Sequence[CostModel]:
        """Asked by `estimate`."""

    @property
    def optimizations(self) -> Sequence[Optimization]:
        """Asked by `optimize`."""

    @property
    def placement_policies(self) -> Sequence[PlacementPolicy]:
        """One of them is asked by `place`."""

    @property
    def schedulers(self) -> Sequence[Scheduler]:
        """One of them is asked by `schedule`."""


@attrs.frozen
class Request:
    """Everything that a plan depends on, beside the program and the plugins.

    Attributes:
        topology: devices and links.
        resident: device id by value, for the inputs that already live somewhere.
        copies: ids of the other devices that hold a copy of an input.
        exact: whether optimizations are left out that round otherwise than the program does.
        fetch: values that the client wants at the end.
        until: the last stage to run.
        placement_policy, scheduler: names of the ones to use.
        pins: pairs of a pattern of module paths and a device, for policies that follow them.
        memory_limits: by device id the bytes that the program may hold there at once.
        latency_target: seconds in which the program should be done; 0: as soon as possible.
        stream: which programs of its structure are under way.
        hints: facts for the stages after `annotate`, beside those of patterns.
        derived: where the values of a recipe are already, by device id, and their copies.
        margin: as in `PlacementContext`.
        rewrite: records substitutions of optimizations; None: they are left out.
    """

    topology: NetworkTopology
    resident: Mapping[int, str] = attrs.field(factory=dict)
    fetch: tuple[int, ...] = ()
    until: Stage = "schedule"
    placement_policy: str = "single"
    scheduler: str = "sequential"
    copies: Mapping[int, tuple[str, ...]] = attrs.field(factory=dict)
    exact: bool = True
    pins: tuple[tuple[str, str], ...] = ()
    memory_limits: Mapping[str, int] = attrs.field(factory=dict)
    latency_target: float = 0.0
    stream: Stream = ALONE
    hints: Mapping[str, tuple[Any, ...]] = attrs.field(factory=dict)
    derived: Derived = attrs.field(default=not_derived, eq=False)
    margin: float = MARGIN
    rewrite: Rewrite | None = attrs.field(default=None, eq=False, repr=False)


def plan(
    program: Program | ProgramGraph,
    plugins: Plugins,
    request: Request,
    *,
    profile: WorkloadProfile | None = None,
    known: Known = NOTHING_KNOWN,
    known_plan: OptimizationPlan | None = None,
) -> PipelineResult:
    """Run the stages over a program, in their order, as far as `request.until`.

    Args:
        program: what to plan.
        plugins: whom to ask.
        request: what else the plan depends on.
        profile: the program's profile, where it is known from another of the same kind.
        known: how long values live that come from earlier programs, as `annotate` has it.
        known_plan: what the optimizations left of the program, where that is known; they do not run then.

    Raises:
        ConfigurationError: no plugin offers the placement policy or the scheduler that was asked for.
        InvalidStage: no device can run the program.
    """
    graph = program if isinstance(program, ProgramGraph) else ProgramGraph(program)
    policy = _chosen("placement policy", request.placement_policy, plugins.placement_policies, _POLICY)
    maker = _chosen("scheduler", request.scheduler, plugins.schedulers, _SCHEDULER)
    clock, topology = _StageTimes(), request.topology
    result = PipelineResult(graph, topology, seconds=clock.seconds)

    profile = profile or clock.time("annotate", lambda: annotate(graph, plugins.patterns, known=known))
    result = attrs.evolve(result, profile=profile)
    if request.until == "annotate":
        return result

    costs = clock.time("estimate", lambda: estimate(graph, plugins.cost_models, topology))
    result = attrs.evolve(result, costs=costs)
    if request.until == "estimate":
        return result

    context = _beginning(graph, profile, costs, request)
    selected = _selected(plugins, request.exact)
    optimized = known_plan or _with_left_out(
        clock.time("optimize", lambda: optimize(context, selected)), plugins, selected
    )
    if not isinstance(rewritten := "" if known_plan else _rewritten(context, graph, optimized, plugins, request), str):
        return attrs.evolve(rewritten, recorded=profile)  # planned in place of this program, and only once
    result = attrs.evolve(result, plan=(optimized := _unsubstituted(optimized, rewritten)))
    if request.until == "optimize":
        return result

    placement = clock.time("place", lambda: place(_where(context, optimized, request), policy, *_FALLBACKS))
    if (again := [o for o in selected if o.after_placement]) and not known_plan:  # once more, knowing where things are
        placed = _placed(context, optimized, placement, again, request)
        optimized = clock.time("optimize", lambda: optimize(placed, again))
        if attrs.evolve(optimized, results=()) != attrs.evolve(placed.plan, results=()):
            placement = clock.time("place", lambda: place(_where(context, optimized, request), policy, *_FALLBACKS))
    result = attrs.evolve(result, plan=optimized, placement=placement)
    if request.until == "place":
        return result

    order = _order(graph, optimized, placement, costs, request)
    return attrs.evolve(result, schedule=clock.time("schedule", lambda: schedule(order, maker, _SCHEDULER)))


def _beginning(graph: ProgramGraph, profile: WorkloadProfile, costs: Costs, request: Request) -> OptimizationContext:
    known = (graph, profile, costs, request.topology, starting_plan(graph, profile, request.hints), _kept(graph))
    return OptimizationContext(*known, stream=request.stream, margin=request.margin)


def _placed(
    context: OptimizationContext,
    plan: OptimizationPlan,
    placement: Placement,
    again: Sequence[Optimization],
    request: Request,
) -> OptimizationContext:
    """The context of the second pass: where things are, and will be. Who is asked again, and did nothing, says why then."""
    asked = {optimization.name for optimization in again}
    results = tuple(r for r in plan.results if r.applied or r.optimization not in asked)
    context = attrs.evolve(context, plan=attrs.evolve(plan, results=results), placement=placement)
    return attrs.evolve(context, resident=request.resident, copies=request.copies)


def _where(context: OptimizationContext, plan: OptimizationPlan, request: Request) -> PlacementContext:
    known = (context.graph, context.profile, plan, context.costs, context.topology)
    there = (request.resident, request.copies, dict(request.pins), request.stream)
    return PlacementContext(*known, *there, request.fetch, request.memory_limits, request.margin)


def _order(
    graph: ProgramGraph, plan: OptimizationPlan, placement: Placement, costs: Costs, request: Request
) -> SchedulingContext:
    aims = (request.memory_limits, request.latency_target)
    known = (graph.program, graph, plan, placement, costs, request.topology)
    return SchedulingContext(*known, request.resident, request.fetch, request.copies, *aims)


def _rewritten(
    context: OptimizationContext, graph: ProgramGraph, plan: OptimizationPlan, plugins: Plugins, request: Request
) -> PipelineResult | str:
    """The result for the program that comes of what the optimizations substitute; why there is none, where there is none."""
    substituted = [o for o in plan.results if o.rewrite.substitutions]
    if not substituted:
        return ""
    rewritten = substitute(graph, context.profile, substituted, request.rewrite)
    return rewritten if isinstance(rewritten, str) else _plan_rewritten(rewritten, substituted, plugins, request)


def _unsubstituted(plan: OptimizationPlan, why: str) -> OptimizationPlan:
    return attrs.evolve(plan, results=tuple(_without(r, why) for r in plan.results))


def _without(result: OptimizationResult, why: str) -> OptimizationResult:
    """Remainder of a result whose substitutions could not be recorded."""
    rewrite = attrs.evolve(result.rewrite, substitutions=())
    if rewrite == result.rewrite:
        return result
    reason = f"its substitution cannot be recorded: {why}" if why else "its substitution cannot be used here"
    return attrs.evolve(result, applied=bool(rewrite), rewrite=rewrite, reason=reason)


def _plan_rewritten(
    rewritten: RewrittenProgram, results: Sequence[OptimizationResult], plugins: Plugins, request: Request
) -> PipelineResult:
    done = {result.optimization for result in results}
    rest = PluginOverrides(plugins, optimizations=tuple(o for o in plugins.optimizations if o.name not in done))
    resident, copies = dict(request.resident), dict(request.copies)
    for recipe in rewritten.recipes:  # what is made of weights is where it is, or will stay where they are
        if (there := request.derived(recipe)) is not None:
            resident |= dict(zip(recipe.makes, there.homes, strict=True))
            copies |= {v: held for v, held in zip(recipe.makes, there.copies, strict=True) if held}
            continue
        homes = [resident[v] for v in recipe.sources if v in resident]
        resident |= dict.fromkeys(recipe.makes, homes[0]) if homes else {}
    groups = groups_after(rewritten, request.hints.get("groups", ()))
    hints = {**request.hints, "groups": groups} if groups else request.hints
    again = attrs.evolve(request, resident=resident, copies=copies, hints=hints)
    result, rewritten = _planned_again(rewritten, rest, again)
    if result.plan is not None:
        result = attrs.evolve(result, plan=attrs.evolve(result.plan, results=(*results, *result.plan.results)))
    if result.schedule is not None:
        result = attrs.evolve(result, schedule=attrs.evolve(result.schedule, rewritten=rewritten))
    return result


def _planned_again(
    rewritten: RewrittenProgram, plugins: Plugins, request: Request
) -> tuple[PipelineResult, RewrittenProgram]:
    """The plan of a rewritten program, which may have been rewritten once more; and how it came of the first one."""
    result = plan(ProgramGraph(rewritten.program), plugins, request)
    more = result.schedule.rewritten if result.schedule is not None else None
    if more is None:
        return result, rewritten
    if (both := composed(rewritten, more)) is not None:
        return result, both
    known = result.plan.results if result.plan is not None else ()
    done = {r.optimization for r in known if r.rewrite.substitutions}
    rest = PluginOverrides(plugins, optimizations=tuple(o for o in plugins.optimizations if o.name not in done))
    return _planned_again(rewritten, rest, request)


class PluginOverrides:
    """Plugins with other cost models or optimizations in place of theirs."""

    def __init__(self, plugins: Plugins, **others: Sequence[Any]) -> None:
        """`others`: by the name of the member what stands in its place."""
        self._plugins = plugins
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plugins, name)


def planned(
    program: Program | ProgramGraph,
    plugins: Plugins,
    request: Request,
    cache: AnalysisCache,
    known_plan: OptimizationPlan | None = None,
) -> PipelineResult:
    """As `plan`, but analyse nothing where a program with the same content was planned before, under the same names of modules."""
    graph = program if isinstance(program, ProgramGraph) else ProgramGraph(program)
    mark = fingerprint(graph.program)
    profile_key = (mark.topology, mark.shapes, graph.module_names.key, _identity(plugins))
    plan_key = (*profile_key, _circumstances(request, mark.values), _content(known_plan, mark.values))
    if (found := cache.find_plan(plan_key)) is not None:
        if found.values == mark.values and _still_fits(found.result, request):  # the same program once more
            return attrs.evolve(found.result, seconds={})
        if found.result.recorded is None:  # that of a rewritten one is in the names of the program that came of it
            rebound = rebind(found.result, graph, found.values, mark.values)
            if _still_fits(rebound, request):
                return rebound
    known = cache.find_profile(profile_key)
    recorded = known.result.recorded or known.result.profile if known is not None else None
    profile = rebind_profile(recorded, known.names(mark.values)) if known is not None and recorded is not None else None
    result = plan(graph, plugins, request, profile=profile, known_plan=known_plan)
    cache.store(profile_key, plan_key, CachedAnalysis(result, mark.values))
    return result


def _content(known_plan: OptimizationPlan | None, values: tuple[int, ...]) -> Hashable:
    """A plan, with values by their numbers."""
    if known_plan is None:
        return None
    numbers = {value: number for number, value in enumerate(values)}
    return repr(rebind_plan(known_plan, numbers))


def _still_fits(result: PipelineResult, request: Request) -> bool:
    """True if a plan fits that was made when devices had more room, or for smaller values."""
    if result.placement is None or result.plan is None or result.profile is None:
        return True
    known = (result.graph, result.profile, result.plan, result.costs or Costs({}), request.topology)
    there = (request.resident, request.copies, dict(request.pins), request.stream)
    context = PlacementContext(*known, *there, request.fetch, request.memory_limits)
    return not shortages(context, result.placement, spill=result.placement.spills)


def asked_by_size(plugins: Plugins, *, exact: bool, policy: str, scheduler: str) -> tuple[str, ...]:
    """Plugins in use that do not say that they tolerate growth, by kind and name: plans hold for fewer sizes with them.

    A policy or a scheduler that is not the chosen one is not in use; `exact` as in `Request`.
    """
    used: list[tuple[str, Any]] = [
        *(("pattern", p) for p in plugins.patterns),
        *(("cost model", m) for m in plugins.cost_models),
        *(("optimization", o) for o in _selected(plugins, exact)),
        *(("placement policy", p) for p in plugins.placement_policies if p.name == policy),
        *(("scheduler", s) for s in plugins.schedulers if s.name == scheduler),
    ]
    return tuple(f"{kind} {one.name!r}" for kind, one in used if not one.tolerates_growth)


def _selected(plugins: Plugins, exact: bool) -> list[Optimization]:
    return [o for o in plugins.optimizations if o.exact or not exact]


def _with_left_out(plan: OptimizationPlan, plugins: Plugins, selected: Sequence[Optimization]) -> OptimizationPlan:
    """The plan, which says of optimizations that were not asked that their results might round otherwise."""
    asked = {id(optimization) for optimization in selected}
    left_out = tuple(
        [
            OptimizationResult(o.name, applied=False, reason=_LEFT_OUT)
            for o in plugins.optimizations
            if id(o) not in asked
        ]
    )
    return attrs.evolve(plan, results=(*plan.results, *left_out)) if left_out else plan


_IDENTITIES = 16
_identities: dict[int, tuple[Plugins, Hashable]] = {}


def _identity(plugins: Plugins) -> Hashable:
    """Plugins that take part, and their versions. Registries never change."""
    found = _identities.get(id(plugins))
    if found is None or found[0] is not plugins:
        rows = tuple((row.name, row.distribution, row.version) for row in getattr(plugins, "rows", ()))
        objects: list[Any] = [
            *plugins.patterns, *plugins.cost_models, *plugins.optimizations, *plugins.placement_policies, *plugins.schedulers
        ]  # fmt: skip
        # The objects themselves: two of one class and name may be configured differently.
        key = _Key((rows, tuple((type(o).__module__, type(o).__qualname__, o.name, _Same(o)) for o in objects)))
        if len(_identities) >= _IDENTITIES:
            _identities.clear()
        found = _identities[id(plugins)] = (plugins, key)
    return found[1]


class _Key:
    """A key whose hash is computed once."""

    def __init__(self, content: Hashable) -> None:
        self._content, self._hash = content, hash(content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (self is other or self._content == other._content)

    def __hash__(self) -> int:
        return self._hash


@attrs.frozen(eq=False)
class _Same:
    """An object by its identity, kept alive so that no other can take it."""

    kept: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.kept is other.kept

    def __hash__(self) -> int:
        return id(self.kept)


def _circumstances(request: Request, values: tuple[int, ...]) -> Hashable:
    """Everything in `request`, with values by their numbers; how full devices are does not count."""
    devices = tuple(attrs.evolve(d, memory_free=None) for d in request.topology.devices)
    homes = tuple(map(request.resident.get, values)) if request.resident else ()
    numbers = {v: number for number, v in enumerate(values)} if request.fetch else {}
    fetch = tuple(numbers.get(v, -1) for v in request.fetch)
    copies = tuple(map(request.copies.get, values)) if request.copies else ()
    names = (request.until, request.placement_policy, request.pins, request.scheduler, request.exact)
    aims = (tuple(request.memory_limits.items()), request.latency_target, request.stream, request.margin)
    return devices, request.topology.links, homes, copies, fetch, aims, request.rewrite is None, *names


_LEFT_OUT = "its results may round otherwise; djinn.configure(exact=False) allows that"
_POLICY = SingleDevice()
_FALLBACKS: tuple[PlacementPolicy, ...] = (_POLICY,)
_SCHEDULER = Sequential()


class _StageTimes:
    """Adds up how long each stage took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)

    def time(self, stage: Stage, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        done = work()
        self.seconds[stage] += time.perf_counter() - start
        return done


N = TypeVar("N", PlacementPolicy, Scheduler)


def _chosen(kind: str, name: str, offered: Sequence[N], built_in: N) -> N:
    candidates = list(offered)
    candidates.append(built_in)
    for candidate in candidates:
        if candidate.name == name:
            return built_in if type(candidate) is type(built_in) else candidate
    names = sorted({c.name for c in candidates})
    close = difflib.get_close_matches(name, names, 1)
    guess = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigurationError(f"there is no {kind} {name!r}; available: {', '.join(names)}{guess}")


def _kept(graph: Graph) -> frozenset[int]:
    """Values that may still be held at the end: what is made and not dead, and every input."""
    return frozenset((*graph.outputs, *graph.inputs))
