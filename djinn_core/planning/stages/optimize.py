"""Stage 4: apply the rewrites of optimizations that preserve results."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from djinn_core.errors import InvalidStage
from djinn_core.hookspecs.optimizations import Optimization, OptimizationContext
from djinn_core.ir.costs import Costs
from djinn_core.ir.graph import Graph
from djinn_core.ir.plan import OptimizationPlan, OptimizationResult, Rewrite, resolve_chains
from djinn_core.ir.profile import WorkloadProfile
from djinn_core.planning.stages.attribution import title, warn_skipped
from djinn_core.planning.stages.verify_rewrite import check_rewrite
from djinn_core.planning.stages.verify_substitution import check_substitutions

_NO_HINTS: Mapping[str, tuple[Any, ...]] = {}


def starting_plan(
    graph: Graph, profile: WorkloadProfile, hints: Mapping[str, tuple[Any, ...]] = _NO_HINTS
) -> OptimizationPlan:
    """Return the plan before any optimization: every node, with `hints` and the hints of patterns."""
    plan = OptimizationPlan(tuple(node.id for node in graph.nodes), hints=hints)
    for match in profile.patterns:
        plan = attrs.evolve(plan, hints=_add_hints(plan.hints, match.hints))
    return plan


def optimize(context: OptimizationContext, optimizations: Sequence[Optimization]) -> OptimizationPlan:
    """Return the plan after all optimizations ran over `context.plan`, ordered by `before` and `after`.

    Each rewrite is verified before it is applied. An optimization that raises, returns another type or breaks an
    invariant leaves the plan unchanged, and a warning names it.
    """
    plan = context.plan
    for optimization in in_execution_order(optimizations):
        try:
            result = optimization.optimize(attrs.evolve(context, plan=plan))
            author = title("optimization", optimization)
            if not isinstance(result, OptimizationResult):
                raise InvalidStage(f"{author} returned a {type(result).__name__}; return an OptimizationResult")
            check_rewrite(context.graph, plan, result.rewrite, context.kept, author)
            check_substitutions(context.graph, plan, result.rewrite.substitutions, context.kept, author)
            if any(s.nodes & plan.substituted_nodes for s in result.rewrite.substitutions):
                reason = "another optimization substitutes some of its nodes"
                result = OptimizationResult(optimization.name, applied=False, reason=reason)
        except Exception as error:
            reason = warn_skipped("optimization", optimization, error, "the plan is not changed", context.graph)
            result = OptimizationResult(optimization.name, applied=False, reason=reason)
        plan = _apply(plan, result, context.costs)
    return plan


def in_execution_order(optimizations: Sequence[Optimization]) -> tuple[Optimization, ...]:
    """Return the optimizations in an order that satisfies `before` and `after`.

    Ties go to the first name, and a cycle is broken at its first name.
    """
    by_name = {o.name: o for o in sorted(optimizations, key=lambda o: o.name)}
    waits: dict[str, set[str]] = {n: {a for a in o.after if a in by_name and a != n} for n, o in by_name.items()}
    for name, optimization in by_name.items():
        for later in optimization.before & by_name.keys() - {name}:
            waits[later].add(name)
    ready = [n for n in by_name if not waits[n]]
    heapq.heapify(ready)
    order: list[str] = []
    while len(order) < len(by_name):
        name = heapq.heappop(ready) if ready else min(n for n in by_name if n not in order)
        order.append(name)
        for waiting_name, pending in waits.items():
            if name in pending:
                pending.discard(name)
                if not pending and waiting_name not in order:
                    heapq.heappush(ready, waiting_name)
    return tuple(by_name[n] for n in order)


def _apply(plan: OptimizationPlan, result: OptimizationResult, costs: Costs) -> OptimizationPlan:
    """Return the plan with the rewrite applied, and the result with the predicted times before and after."""
    before = _seconds(costs, plan.nodes)
    rewrite = result.rewrite if result.applied else Rewrite()
    nodes = tuple(n for n in plan.nodes if n not in rewrite.drop)
    result_with_times = attrs.evolve(
        result, rewrite=rewrite, seconds_before=before, seconds_after=_seconds(costs, nodes)
    )
    return OptimizationPlan(
        nodes=nodes,
        replace=resolve_chains({**plan.replace, **rewrite.replace}),
        results=(*plan.results, result_with_times),
        hints=_add_hints(plan.hints, rewrite.hints),
        equal_slots=tuple(dict.fromkeys((*plan.equal_slots, *rewrite.equal_slots))),
        replicas=(*plan.replicas, *rewrite.replicas),
    )


def _seconds(costs: Costs, nodes: Sequence[int]) -> float:
    """Return the sequential time of these nodes on the device that runs them fastest."""
    return min((sum(estimates[n].seconds for n in nodes) for estimates in costs.by_device.values()), default=0.0)


def _add_hints(hints: Mapping[str, tuple[Any, ...]], new_hints: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    all_hints = dict(hints)
    for name, facts in new_hints.items():
        all_hints[name] = all_hints.get(name, ()) + (tuple(facts) if isinstance(facts, list | tuple) else (facts,))
    return all_hints
