"""Plans each new program once, and finds the plan again for every program of the same structure.

A small program runs as it was recorded when it comes for the first time, and is planned when it comes again: planning takes
several times as long as running it, and most small programs of a script that was just started do not come again. A tiny one, which
a plan hardly makes faster, runs as it was recorded until its runs have taken as long as its plan will.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from djinn_client.runtime.planning.ab_tests import NOTHING, AbTests, Verdicts, Without, substituting_optimizations
from djinn_client.runtime.planning.plan_cache import PlanCache, PlanLookup
from djinn_client.runtime.planning.size_range import FACTOR
from djinn_client.runtime.sending.template import PreparedTemplate, make_template, relied_on
from djinn_client.runtime.stats import Stats
from djinn_client.torch_dispatch import modes_as_before
from djinn_core.ir.program import Program
from djinn_core.system.interrupts import interrupt_mask

if TYPE_CHECKING:
    from djinn_client.runtime.planning.placement_trials import PlacementTrials
    from djinn_core.hookspecs.optimizations import Judge
    from djinn_core.ir.profile import WorkloadProfile
    from djinn_core.ir.result import PipelineResult

# A program is small that has few instructions, or whose instructions all take small tensors.
FEW_INSTRUCTIONS = 48
SMALL_BYTES = 64 << 10
# A tiny one has both. Planning it takes as many Python calls as eight to ten of its runs.
TINY_INSTRUCTIONS = 16
UNPLANNED_RUNS = 8
RECENT = 24  # submissions: several steps of a loop, also where each is sent in pieces
VARIANTS_LIMIT = 4  # plans of one structure that differ in the scalars that they rely on

Recent = deque[tuple[Any, Sequence[int]]]  # plans of whatever kind a session has, with the values that each stood for

_SIZES_CHANGE = "the program's sizes keep changing, and this substitution is valid for one size only"


class PlannedProgram(msgspec.Struct, frozen=True):
    """A program that was planned, or a piece of one.

    Attributes:
        result: what the stages made of it.
        profile: of what was planned. whole: of the program that it is, or is a piece of.
    """

    result: PipelineResult
    profile: WorkloadProfile
    whole: WorkloadProfile


PlanProgram = Callable[[Program, Without], PlannedProgram]


class PlanKeeper(Protocol):
    """Plans that outlive the process."""

    def restore(self, program: Program, found: PlanLookup[PreparedTemplate]) -> PreparedTemplate | None:
        """The plan of an earlier process for `program`; None without one."""

    def keep(
        self, program: Program, found: PlanLookup[PreparedTemplate], prepared: PreparedTemplate, planned: PlannedProgram
    ) -> None:
        """A plan was made of `program`."""


class Planning(msgspec.Struct, frozen=True):
    """Planning of a session's programs, and what plans depend on by the plugins in use.

    Attributes:
        plan: makes a plan. made: is told of each new one and its program. keeper: keeps plans for later processes.
        factor: as in `PlanCache`.
        judge: decides which optimizations are faster, if a plugin offers one.
        unsure: names of optimizations whose rewrites may depend on sizes and scalars, so that their plans hold for these only.
    """

    plan: PlanProgram
    made: Callable[[PreparedTemplate, Program, PlannedProgram], None] = lambda *_: None
    keeper: PlanKeeper | None = None
    factor: int = FACTOR
    judge: Judge | None = None
    unsure: Container[str] = frozenset()


class Planner:
    """From programs to prepared templates. Not thread-safe: the session's lock is held around it.

    Attributes:
        recent: plans that were asked for, the latest last.
        placements: tries placements over several executors, where the client chose the policy and a plugin judges.
        learns_margin: whether such placements have to be predicted to save more where predictions were wrong.
    """

    placements: PlacementTrials | None = None
    learns_margin = False

    def __init__(
        self, stats: Stats, planning: Callable[[Recent], Planning], needs_plan: Callable[[], bool] = lambda: True
    ) -> None:
        """`planning`: is called with `recent` before the first program is planned, as it imports most of what plans.

        `needs_plan`: whether a small program is planned when it comes for the first time, too.
        """
        self._begin_planning = planning
        self._begun: Planning | None = None
        self._needs_plan = needs_plan
        self.recent: Recent = deque(maxlen=RECENT)
        self._stats = stats
        self._planned: PlanCache[PreparedTemplate] = PlanCache(FACTOR)
        self.verdicts = Verdicts()
        self._trials = AbTests(None, self._make_other, stats, self.verdicts)

    @property
    def planning(self) -> Planning:
        """Planning, which begins now where nothing was planned before."""
        return self._begun or self.begin()

    def begin(self) -> Planning:
        """Begin to plan: a program is to be planned, or what is imported for that is there anyway."""
        self._begun = planning = self._begin_planning(self.recent)
        self._trials = AbTests(planning.judge, self._make_other, self._stats, self.verdicts)
        if planning.factor != FACTOR:
            self._planned = PlanCache(planning.factor)
        return planning

    def prepare(self, program: Program) -> tuple[PreparedTemplate, list[int]]:
        """The plan of a program, and its values by first appearance."""
        left = self._planned.ranges_left
        variants, values = self._planned.find(program)
        # A tiny program runs as it was recorded: nothing has to be known for it of what plans depend on.
        unplanned = variants[0].runs_unplanned > 0 if variants else _is_tiny(program)
        if unplanned and not self._needs_plan():
            return self._unplanned(program, variants, values)
        if self._begun is None:
            self.begin()
            return self.prepare(program)
        seen = bool(variants) or self._planned.ranges_left > left
        if variants and variants[0].recorded is not None:
            variants.clear()
        if not variants and (kept := self._restored(program)) is not None:
            variants.append(kept)
            self.recent.append((kept, values))
            return kept, list(values)
        if not seen and _is_small(program) and not self._needs_plan():
            return self._unplanned(program, variants, values)
        for prepared in variants:
            if prepared.holds_for(program):
                self._stats.plans_reused += 1
                chosen = self._trials.choose(prepared, program) if self._trials.tried else prepared
                self.recent.append((chosen, values))
                return chosen, list(values)
        if variants and (kept := self._restored(program)) is not None:
            variants.append(kept)
            del variants[:-VARIANTS_LIMIT]
            self.recent.append((kept, values))
            return kept, list(values)
        found, without = self._planned.latest, {**self.verdicts.about(program), **self._held_by_sizes(variants)}
        began = time.perf_counter()
        if self._planned.ranges_left > left or any(one.held_by_sizes for one in variants):
            self._stats.plans_for_sizes += 1
        planned = self._planned_program(program, without)
        prepared = self._prepared(planned, program)
        if (keeper := self.planning.keeper) is not None and not without:
            keeper.keep(program, found, prepared, planned)
        self._trials.begin(prepared, substituting_optimizations(planned.result), time.perf_counter() - began, program)
        self.recent.append((prepared, values))
        variants.append(prepared)
        del variants[:-VARIANTS_LIMIT]
        return prepared, list(values)

    def _restored(self, program: Program) -> PreparedTemplate | None:
        """The plan of an earlier process; None without one."""
        keeper = self.planning.keeper
        if keeper is None:
            return None
        prepared = keeper.restore(program, self._planned.latest)
        if prepared is not None:
            self._stats.plans_restored += 1
        return prepared

    def _unplanned(
        self, program: Program, variants: list[PreparedTemplate], values: Sequence[int]
    ) -> tuple[PreparedTemplate, list[int]]:
        """A run of the program as it was recorded."""
        if variants:
            return self._once_more(variants[0], values)
        prepared = make_template(program, range(len(program)), {}, ())
        prepared.recorded = program
        prepared.runs_unplanned = UNPLANNED_RUNS if _is_tiny(program) else 1
        variants.append(prepared)
        return self._once_more(prepared, values)

    def _once_more(self, prepared: PreparedTemplate, values: Sequence[int]) -> tuple[PreparedTemplate, list[int]]:
        """The template of a program as it was recorded, for one run."""
        self._stats.programs_unplanned += 1
        prepared.runs_unplanned -= 1
        self.recent.append((prepared, values))
        return prepared, list(values)

    def _held_by_sizes(self, variants: Sequence[PreparedTemplate]) -> Without:
        """Optimizations that put substitutions into all plans so far, which hold for the very sizes that they were made for.

        A program whose sizes keep changing would be planned for ever with them.
        """
        if len(variants) < VARIANTS_LIMIT - 1 or not all(one.held_by_sizes for one in variants):
            return NOTHING
        return dict.fromkeys((name for one in variants for name in one.substituted), _SIZES_CHANGE)

    def _make_other(self, program: Program, without: Without) -> PreparedTemplate:
        return self._prepared(self._planned_program(program, without), program)

    def _planned_program(self, program: Program, without: Without) -> PlannedProgram:
        self._stats.plans_made += 1
        with modes_as_before(), interrupt_mask.unmasked():
            return self.planning.plan(program, without)

    def _prepared(self, planned: PlannedProgram, program: Program) -> PreparedTemplate:
        from djinn_core.ir.schedule import Run  # with what plans

        result = planned.result
        schedule = result.schedule
        assert schedule is not None
        (steps,) = schedule.steps.values()
        nodes = [node for step in steps if isinstance(step, Run) for node in step.nodes]
        prepared = make_template(
            schedule.program, nodes, schedule.replace, schedule.equal_slots, rewritten=schedule.rewritten
        )
        prepared.relied, prepared.fixed = relied_on(program, result, self.planning.unsure)
        results = result.plan.results if result.plan is not None else ()
        unsure = (r.optimization for r in results if r.applied and r.optimization in self.planning.unsure)
        prepared.substituted = tuple(dict.fromkeys((*substituting_optimizations(result), *unsure)))
        prepared.profile = planned.whole
        if result.costs is not None:
            prepared.predicted = result.costs.seconds(next(iter(schedule.steps)))
        self.planning.made(prepared, program, planned)
        return prepared

    @property
    def last_profile(self) -> WorkloadProfile | None:
        """Profile of the whole program of which a plan was asked for last; None if there was none."""
        plan: PreparedTemplate | None = self.recent[-1][0] if self.recent else None
        if plan is not None and plan.profile is None and (program := plan.recorded or plan.restored) is not None:
            plan.profile = self._planned_program(program, NOTHING).whole
        return plan.profile if plan is not None else None


def _is_small(program: Program) -> bool:
    """True if planning a program takes longer than running it."""
    return len(program) <= FEW_INSTRUCTIONS or _takes_small_tensors(program)


def _is_tiny(program: Program) -> bool:
    """True if even several runs of a program take less time than its plan."""
    return len(program) <= TINY_INSTRUCTIONS and _takes_small_tensors(program)


def _takes_small_tensors(program: Program) -> bool:
    return all(operand.nbytes <= SMALL_BYTES for call in program.calls for operand in call.operands)
