"""Plan cache keyed by program content."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import attrs

from djinn_core.ir.graph import Graph
from djinn_core.ir.plan import OptimizationPlan
from djinn_core.ir.program import Program
from djinn_core.ir.result import PipelineResult
from djinn_core.planning.pipeline import placement_context, plan
from djinn_core.planning.request import Plugins, Request
from djinn_core.planning.stages.placement_fit import shortages
from djinn_profiler.plans.analysis_cache import AnalysisCache, CachedAnalysis
from djinn_profiler.plans.fingerprint import fingerprint
from djinn_profiler.plans.rebinding import rebind, rebind_plan, rebind_profile


def planned(
    program: Program | Graph,
    plugins: Plugins,
    request: Request,
    cache: AnalysisCache,
    known_plan: OptimizationPlan | None = None,
) -> PipelineResult:
    """Return the cached plan of a program with equal content and module names, or else plan `program`."""
    graph = program if isinstance(program, Graph) else Graph(program)
    mark = fingerprint(graph.program)
    profile_key = (mark.topology, mark.shapes, graph.module_names.key, _identity(plugins))
    plan_key = (*profile_key, _circumstances(request, mark.values), _content(known_plan, mark.values))
    if (cached_plan := cache.find_plan(plan_key)) is not None:
        if cached_plan.values == mark.values and _still_fits(
            cached_plan.result, request
        ):  # the same program object again
            return attrs.evolve(cached_plan.result, seconds={})
        if (
            cached_plan.result.recorded_profile is None
        ):  # the plan of a rewritten program uses the names of the rewritten program
            rebound = rebind(cached_plan.result, graph, cached_plan.values, mark.values)
            if _still_fits(rebound, request):
                return rebound
    cached_profile = cache.find_profile(profile_key)
    recorded_profile = (
        cached_profile.result.recorded_profile or cached_profile.result.profile if cached_profile is not None else None
    )
    profile = (
        rebind_profile(recorded_profile, cached_profile.names(mark.values))
        if cached_profile is not None and recorded_profile is not None
        else None
    )
    result = plan(graph, plugins, request, profile=profile, known_plan=known_plan)
    cache.store(profile_key, plan_key, CachedAnalysis(result, mark.values))
    return result


def _content(known_plan: OptimizationPlan | None, values: tuple[int, ...]) -> Hashable:
    """Return a cache key of `known_plan`, in which the number of a value is its position in `values`."""
    if known_plan is None:
        return None
    numbers = {value: number for number, value in enumerate(values)}
    return repr(rebind_plan(known_plan, numbers))


def _still_fits(result: PipelineResult, request: Request) -> bool:
    """Return True if a cached plan fits the present free memory and the sizes of the present values."""
    if result.placement is None or result.plan is None or result.profile is None:
        return True
    context = placement_context(result, request)
    return not shortages(context, result.placement, spill=result.placement.spills)


_IDENTITIES = 16
_identities: dict[int, tuple[Plugins, Hashable]] = {}


def _identity(plugins: Plugins) -> Hashable:
    """Return a cache key of the plugins in use, with their versions. It is cached, because registries never change."""
    identity = _identities.get(id(plugins))
    if identity is None or identity[0] is not plugins:
        rows = tuple((row.name, row.distribution, row.version) for row in getattr(plugins, "rows", ()))
        objects: list[Any] = [
            *plugins.patterns, *plugins.cost_models, *plugins.optimizations, *plugins.placement_policies, *plugins.schedulers
        ]  # fmt: skip
        # The objects themselves: two plugins of one class and name may be configured differently.
        key = _Key((rows, tuple((type(o).__module__, type(o).__qualname__, o.name, _ByIdentity(o)) for o in objects)))
        if len(_identities) >= _IDENTITIES:
            _identities.clear()
        identity = _identities[id(plugins)] = (plugins, key)
    return identity[1]


class _Key:
    def __init__(self, content: Hashable) -> None:
        self._content, self._hash = content, hash(content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (self is other or self._content == other._content)

    def __hash__(self) -> int:
        return self._hash


@attrs.frozen(eq=False)
class _ByIdentity:
    """A cache key for an object by identity. It keeps the object alive so that its id is not reused."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _circumstances(request: Request, values: tuple[int, ...]) -> Hashable:
    """Return a cache key of `request`, in which the number of a value is its position in `values`.

    Free memory of devices is not part of the key.
    """
    devices = tuple(attrs.evolve(d, memory_free=None) for d in request.topology.devices)
    homes = tuple(map(request.resident.get, values)) if request.resident else ()
    numbers = {v: number for number, v in enumerate(values)} if request.fetch else {}
    fetch = tuple(numbers.get(v, -1) for v in request.fetch)
    copies = tuple(map(request.copies.get, values)) if request.copies else ()
    names = (request.until, request.placement_policy, request.pins, request.scheduler, request.exact)
    aims = (tuple(request.memory_limits.items()), request.latency_target, request.stream, request.margin)
    return devices, request.topology.links, homes, copies, fetch, aims, request.rewrite is None, *names
