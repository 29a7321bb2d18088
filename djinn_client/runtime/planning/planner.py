"""Planner: plan a program if a plan can have an effect, otherwise run it as recorded.

Templates are reused for equal structures.

A plan can have an effect if the session limits memory, if a scheduler or placement policy was chosen, if plans are
collected, or if an optimization requests the program. Optimizations are loaded when a program comes for the second
time: a script whose programs all run once imports no optimization.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from djinn_client.runtime.planning.ab_tests import NOTHING, AbTests, Verdicts, Without, substituting_optimizations
from djinn_client.runtime.planning.plan_cache import PlanCache
from djinn_client.runtime.planning.size_range import FACTOR
from djinn_client.runtime.sending.template import PreparedTemplate, make_template, plan_dependencies
from djinn_client.runtime.stats import Stats
from djinn_client.torch_dispatch import modes_as_before
from djinn_core.ir.program import Program
from djinn_core.ir.slot_arrays import Words
from djinn_core.system.interrupts import interrupt_mask

if TYPE_CHECKING:
    from djinn_core.hookspecs.optimizations import Judge
    from djinn_core.ir.profile import WorkloadProfile
    from djinn_core.ir.result import PipelineResult

RECENT = 24  # submissions: several steps of a loop, even if a long loop is cut
VARIANTS_LIMIT = 4  # limit of plans per structure that differ in the scalars on which they depend

Recent = deque[tuple[Any, Program]]  # templates or pooled plans, each with the program for which it ran last

_SIZES_CHANGE = "the program's sizes keep changing, and this substitution is valid for one size only"


class PlannedProgram(msgspec.Struct, frozen=True):
    """A planned program.

    Attributes:
        result: results of the planning stages.
        profile: workload profile of the recorded program.
    """

    result: PipelineResult
    profile: WorkloadProfile


PlanProgram = Callable[[Program, Without], PlannedProgram]
Analyse = Callable[[PreparedTemplate, Program], "WorkloadProfile"]


class Planning(msgspec.Struct, frozen=True):
    """Planning functions for a session's programs, and properties of the plugins in use.

    Attributes:
        plan: returns a plan for a program.
        analyse: returns the profile of a program without a plan.
        on_plan: callback for each new plan and its program.
        factor: as in `PlanCache`.
        judge: decides which optimizations are faster, or None if no plugin has a judge.
        unsure: names of optimizations whose rewrites may depend on sizes and scalars. Their plans hold only for these
            sizes and scalars.
    """

    plan: PlanProgram
    analyse: Analyse
    on_plan: Callable[[PreparedTemplate, Program, PlannedProgram], None] = lambda *_: None
    factor: int = FACTOR
    judge: Judge | None = None
    unsure: Container[str] = frozenset()


class Planner:
    """Return prepared templates for programs. Not thread-safe: the caller holds the session's lock.

    Attributes:
        recent: the last requested templates, each with its program, latest last.
        verdicts: verdicts of A/B tests and of trials of placements.
        asks_optimizations: True if `is_wanted` is called for programs. False until the optimizations are loaded.
    """

    asks_optimizations = False

    def __init__(
        self,
        stats: Stats,
        planning: Callable[[Recent], Planning],
        plans_all: Callable[[], bool] = lambda: True,
        is_wanted: Callable[[Program], bool] = lambda _: False,
        are_loaded: Callable[[], bool] = lambda: True,
        describes_values: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create a planner without plans.

        Args:
            stats: counts plans.
            planning: returns the planning functions. Called with `recent` before the first program is planned, because
                it imports the planning modules.
            plans_all: returns True while every program is planned.
            is_wanted: returns True if an optimization requests a program.
            are_loaded: returns True if the optimizations are loaded. Otherwise the caller of this class loads them, and
                then calls `ask_optimizations`.
            describes_values: returns True if submissions of programs without a plan also send the kinds of values.
        """
        self._begin_planning = planning
        self._planning: Planning | None = None
        self._plans_all, self._is_wanted, self._are_loaded = plans_all, is_wanted, are_loaded
        self._describes_values = describes_values
        self.recent: Recent = deque(maxlen=RECENT)
        self._stats = stats
        self._plans: PlanCache[PreparedTemplate] = PlanCache(FACTOR)
        self.verdicts = Verdicts()
        self._trials = AbTests(None, self._make_without, stats, self.verdicts)

    @property
    def planning(self) -> Planning:
        """Return the planning functions. The first access creates them."""
        if self._planning is None:
            self._planning = planning = self._begin_planning(self.recent)
            self._trials = AbTests(planning.judge, self._make_without, self._stats, self.verdicts)
            if planning.factor != FACTOR:
                self._plans = PlanCache(planning.factor)
        return self._planning

    def prepare(self, program: Program) -> tuple[PreparedTemplate, Words]:
        """Return the template for `program`, and its value ids in order of first use."""
        ranges_left = self._plans.ranges_left
        variants, values = self._plans.find(program)
        for prepared in variants:
            if prepared.holds_for(program):
                break
        else:
            prepared = self._new(program, variants, self._plans.ranges_left > ranges_left)
            self.recent.append((prepared, program))
            return prepared, values
        if prepared.is_planned:
            self._stats.plans_reused += 1
            if self._trials.experiments:
                prepared = self._trials.choose(prepared, program)
        elif not self.asks_optimizations and self._are_loaded():
            self.ask_optimizations()
            return self.prepare(program)
        elif self._plans_all():
            prepared = self._plan(program, variants, for_sizes=False)
        self.recent.append((prepared, program))
        return prepared, values

    def ask_optimizations(self) -> None:
        """Call `is_wanted` from now on, also for programs that have run without a plan."""
        self.asks_optimizations = True
        self._plans = PlanCache(self._plans.factor)

    def _new(self, program: Program, variants: list[PreparedTemplate], for_sizes: bool) -> PreparedTemplate:
        """Return the template of a plan if a plan can have an effect, otherwise the template of the program as recorded."""
        if self._plans_all() or (self.asks_optimizations and self._is_wanted(program)):
            return self._plan(program, variants, for_sizes)
        prepared = make_template(program, range(len(program)), {}, ())
        if self._describes_values():
            self._analyse(prepared, program)
        variants.append(prepared)
        return prepared

    def _plan(self, program: Program, variants: list[PreparedTemplate], for_sizes: bool) -> PreparedTemplate:
        """Return the template of a new plan, and add it to `variants`.

        `for_sizes`: True if a plan of this structure for other sizes exists.
        """
        if self._planning is None and self.planning.factor != FACTOR:
            variants, _ = self._plans.find(program)
        without = {**self.verdicts.switched_off(program), **self._bound_to_sizes(variants)}
        began = time.perf_counter()
        if for_sizes or any(variant.depends_on_sizes for variant in variants):
            self._stats.plans_for_sizes += 1
        planned = self._planned_program(program, without)
        prepared = self._prepare_template(planned, program)
        self._trials.begin(prepared, substituting_optimizations(planned.result), time.perf_counter() - began, program)
        variants[:] = [*[variant for variant in variants if variant.is_planned][1 - VARIANTS_LIMIT :], prepared]
        return prepared

    def _bound_to_sizes(self, variants: Sequence[PreparedTemplate]) -> Without:
        """Return the optimizations to leave out of the next plan, because they bind plans to exact sizes.

        Return none unless almost `VARIANTS_LIMIT` plans exist and all are bound, as for a program with changing sizes.
        """
        if len(variants) < VARIANTS_LIMIT - 1 or not all(variant.depends_on_sizes for variant in variants):
            return NOTHING
        return dict.fromkeys((name for variant in variants for name in variant.size_bound), _SIZES_CHANGE)

    def _make_without(self, program: Program, without: Without) -> PreparedTemplate:
        return self._prepare_template(self._planned_program(program, without), program)

    def _planned_program(self, program: Program, without: Without) -> PlannedProgram:
        self._stats.plans_made += 1
        with modes_as_before(), interrupt_mask.unmasked():
            return self.planning.plan(program, without)

    def _prepare_template(self, planned: PlannedProgram, program: Program) -> PreparedTemplate:
        from djinn_core.ir.schedule import Run  # imported here, because only planning needs it

        result = planned.result
        schedule = result.schedule
        assert schedule is not None
        (steps,) = schedule.steps.values()
        nodes = [node for step in steps if isinstance(step, Run) for node in step.nodes]
        prepared = make_template(
            schedule.program, nodes, schedule.replace, schedule.equal_slots, rewritten=schedule.rewritten
        )
        prepared.relied_calls, prepared.fixed_slots = plan_dependencies(program, result, self.planning.unsure)
        results = result.plan.results if result.plan is not None else ()
        unsure = (r.optimization for r in results if r.applied and r.optimization in self.planning.unsure)
        prepared.size_bound = tuple(dict.fromkeys((*substituting_optimizations(result), *unsure)))
        prepared.is_planned, prepared.profile = True, planned.profile
        if result.costs is not None:
            device = next(iter(schedule.steps))
            prepared.predicted_seconds = result.costs.seconds(device)
            prepared.calibrated = result.topology.device(device).calibration is not None
        self.planning.on_plan(prepared, program, planned)
        return prepared

    def _analyse(self, prepared: PreparedTemplate, program: Program) -> None:
        with modes_as_before(), interrupt_mask.unmasked():
            prepared.profile = self.planning.analyse(prepared, program)

    @property
    def last_profile(self) -> WorkloadProfile | None:
        """Return the workload profile of the last submitted program, or None if none was submitted.

        Programs that ran without a plan are analysed by this call, earliest first, because the kinds of a program's
        values may follow from earlier programs.
        """
        recent = list(self.recent)
        for prepared, program in recent:
            if prepared.profile is None:
                self._analyse(prepared, program)
        return recent[-1][0].profile if recent else None
