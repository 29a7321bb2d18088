"""The program of a plan while optimizations substitute code for its nodes."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from djinn_core.hookspecs.optimizations import Optimization
from djinn_core.ir.graph import Graph
from djinn_core.ir.plan import OptimizationPlan, OptimizationResult
from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.result import PipelineResult
from djinn_core.ir.substitution import RewrittenProgram, compose, groups_after
from djinn_core.planning.request import Plugins, Request, selected_optimizations
from djinn_core.planning.stages.annotate import NOTHING_KNOWN, Known
from djinn_core.planning.substituting import substitute


@attrs.frozen
class Draft:
    """The program that the stages plan now: the recorded program, or its rewrite by substitutions.

    Attributes:
        request: devices, options, and the locations of the inputs of `graph`.
        optimizations: optimizations that may still run. Each substitutes at most once.
        profile: workload profile of `graph`, if it is known.
        known: facts of earlier programs, as in `annotate`.
        results: results of the finished optimizations.
        recorded_profile: profile of the recorded program, if `graph` is a rewrite of it.
        rewritten: the rewrite from the recorded program to `graph`.
    """

    graph: Graph
    request: Request
    optimizations: tuple[Optimization, ...]
    profile: WorkloadProfile | None = None
    known: Known = NOTHING_KNOWN
    results: tuple[OptimizationResult, ...] = ()
    recorded_profile: WorkloadProfile | None = None
    rewritten: RewrittenProgram | None = None

    def after_substitutions(self, analysed: PipelineResult, plan: OptimizationPlan) -> Draft | str:
        """Return the draft of the program with the substitutions of `plan`.

        Returns:
            The draft; or "" if `plan` has no substitutions; or the reason if the substitutions cannot be recorded.
        """
        results = [result for result in plan.results if result.rewrite.substitutions]
        profile = analysed.profile
        if not results or profile is None:
            return ""
        substituted_program = substitute(self.graph, profile, results, self.request.rewrite)
        if isinstance(substituted_program, str):
            return substituted_program
        substituting = {result.optimization for result in results}
        draft = attrs.evolve(self, optimizations=tuple(o for o in self.optimizations if o.name not in substituting))
        composed = substituted_program if self.rewritten is None else compose(self.rewritten, substituted_program)
        if composed is None:
            rejected_results = [attrs.evolve(_without_substitutions(r, _TWICE), applied=False) for r in results]
            return attrs.evolve(draft, profile=profile, results=(*self.results, *rejected_results))
        return attrs.evolve(
            draft,
            graph=Graph(substituted_program.program),
            request=_request_after(self.request, substituted_program),
            profile=None,
            known=NOTHING_KNOWN,
            results=(*self.results, *results),
            recorded_profile=self.recorded_profile or profile,
            rewritten=composed,
        )

    def with_all_results(self, result: PipelineResult, plugins: Plugins) -> PipelineResult:
        """Return `result` with the outcome of each optimization, also of finished ones and those `exact` excludes."""
        plan = result.plan
        if plan is None:
            return result
        selected_ids = {id(optimization) for optimization in selected_optimizations(plugins, self.request.exact)}
        left_out = [
            OptimizationResult(o.name, applied=False, reason=_LEFT_OUT)
            for o in plugins.optimizations
            if id(o) not in selected_ids
        ]
        return attrs.evolve(result, plan=attrs.evolve(plan, results=(*self.results, *plan.results, *left_out)))


def without_substitutions(plan: OptimizationPlan, why: str) -> OptimizationPlan:
    """Return `plan` without its substitutions, which could not be recorded. Its results say why (`why`)."""
    reason = (
        f"its substitution cannot be recorded: {why}" if why else "its substitution cannot be used for this program"
    )
    return attrs.evolve(plan, results=tuple(_without_substitutions(r, reason) for r in plan.results))


def _without_substitutions(result: OptimizationResult, reason: str) -> OptimizationResult:
    rewrite = attrs.evolve(result.rewrite, substitutions=())
    if rewrite == result.rewrite:
        return result
    return attrs.evolve(result, applied=bool(rewrite), rewrite=rewrite, reason=reason)


def _request_after(request: Request, rewritten: RewrittenProgram) -> Request:
    """Return the request for the rewritten program.

    A value of a recipe is on the devices that hold it already, or else on the device of its first resident weight.
    """
    resident, copies = dict(request.resident), dict(request.copies)
    for recipe in rewritten.recipes:
        if (locations := request.locate_recipe(recipe)) is not None:
            resident |= dict(zip(recipe.placeholders, locations.homes, strict=True))
            copies |= {v: devices for v, devices in zip(recipe.placeholders, locations.copies, strict=True) if devices}
            continue
        homes = [resident[v] for v in recipe.sources if v in resident]
        resident |= dict.fromkeys(recipe.placeholders, homes[0]) if homes else {}
    groups = groups_after(rewritten, request.hints.get("groups", ()))
    hints = {**request.hints, "groups": groups} if groups else request.hints
    return attrs.evolve(request, resident=resident, copies=copies, hints=hints)


def without_idle_results(plan: OptimizationPlan, again: Sequence[Optimization]) -> OptimizationPlan:
    """Return `plan` without results of optimizations that run again (`again`) and were not applied at first."""
    names = {optimization.name for optimization in again}
    return attrs.evolve(plan, results=tuple(r for r in plan.results if r.applied or r.optimization not in names))


_LEFT_OUT = "its results may round otherwise; djinn.configure(exact=False) allows that"
_TWICE = "it computes with values that another optimization derives from weights"
