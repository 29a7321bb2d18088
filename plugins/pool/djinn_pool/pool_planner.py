"""Plan programs for the executors of a pool. A cached plan is reused while the program's inputs stay at their locations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import attrs

from djinn_client.runtime.planning.constraints import MemoryInUse
from djinn_client.runtime.planning.plan_cache import PlanCache
from djinn_client.runtime.planning.planner import RECENT, Recent
from djinn_client.runtime.planning.residency_history import ResidencyHistory
from djinn_client.runtime.sending.template import plan_dependencies
from djinn_client.runtime.stats import Stats
from djinn_client.torch_dispatch import modes_as_before
from djinn_core.ir.costs import DeviceCapabilities
from djinn_core.ir.graph import Graph
from djinn_core.ir.handles import storage_of
from djinn_core.ir.placement import MARGIN
from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.program import Program
from djinn_core.ir.result import PipelineResult
from djinn_core.ir.stream import ALONE, Stream
from djinn_core.system.interrupts import interrupt_mask
from djinn_pool.load_balancing import ProgramFamily
from djinn_pool.lowering import ProgramPlacement, build_plan, resident
from djinn_pool.parts import PooledPlan
from djinn_pool.placement_trials import PredictionErrors, TriedPlacement, margin_of
from djinn_pool.plan_for_pool import PlanningInputs, PoolRules
from djinn_pool.pooled_derived_values import PooledDerivedValues, RunPlan
from djinn_pool.value_locations import ValueLocations

VARIANTS_LIMIT = 16  # cached plans per structure; they differ in locations, scalars and proposed executors


PlanForPool = Callable[[Graph, PlanningInputs], PipelineResult]
FreeCopies = Callable[[Sequence[tuple[int, int]]], None]


class PoolPlanner:
    """Plans programs and caches the plans. Not thread-safe: the caller holds the recorders' lock.

    Attributes:
        derived: values derived from weights.
        memory: bytes that the session may use on each executor, by number. None stands for unknown.
        calibrated: True if all devices have measured speeds.
        devices: device id of each executor, by number.
        random: executor that has the random state, or None before the first random op.
        link_changes: number of link changes so far. Plans with another number are not reused.
        errors: prediction errors of programs on one executor.
    """

    derived: PooledDerivedValues
    memory: Sequence[int | None] = ()
    calibrated = False

    def __init__(
        self,
        plan: PlanForPool,
        stats: Stats,
        locations: ValueLocations,
        rules: PoolRules,
    ) -> None:
        """Create a planner without executors, which `join` adds.

        Args:
            plan: function that runs the planning stages.
            stats: counters of the session.
            locations: locations of all values.
            rules: settings for plans.
        """
        self._rules = rules
        self._plan = plan
        self.devices: tuple[str, ...] = ()
        self._stats = stats
        self._locations = locations
        self._plans: PlanCache[ProgramFamily] = PlanCache(rules.factor)
        self._recent: Recent = deque(maxlen=RECENT)
        self._earlier = ResidencyHistory(self._recent)
        self.random: int | None = None
        self.link_changes = 0
        self.errors = PredictionErrors()
        self._free: FreeCopies = lambda _: None

    def follow(self, rules: PoolRules) -> None:
        """Replace the rules, and discard all plans."""
        self._rules = rules
        self._plans = PlanCache(rules.factor)

    def join(self, device: str) -> None:
        """Add an executor with this device."""
        self.devices = (*self.devices, device)
        self.derived.join(device)

    def discard_plans(self) -> None:
        """Discard all plans, because the executors have changed."""
        self.follow(self._rules)

    def know_devices(self, devices: Sequence[DeviceCapabilities]) -> None:
        """Note if all devices are calibrated. Forget prediction errors, because they belong to the previous calibrations."""
        self.calibrated = all(device.calibration is not None for device in devices)
        self.errors = PredictionErrors()

    def find(self, program: Program) -> tuple[ProgramFamily, tuple[int, ...]]:
        """Return the family of programs of the same structure, and the program's values in order of appearance."""
        family, values = self._plans.find(program)
        if not family:
            family.append(ProgramFamily())
        return family[0], tuple(values.tolist())

    def act_by(self, run: RunPlan, free: FreeCopies) -> None:
        """Set functions, and forget derived values. `run` submits a plan that derives values, `free` frees copies of values."""
        self._free = free
        self.derived = PooledDerivedValues(self.devices, self._locations, run)

    def prepare(
        self, program: Program, family: ProgramFamily, values: Sequence[int], proposed: int | None
    ) -> tuple[PooledPlan, Sequence[int]]:
        """Return the plan of a program, and the values of this run by the plan's numbers.

        Args:
            program: the program.
            family: its family, from `find`.
            values: its values, from `find`.
            proposed: the executor that load balancing proposes, or None.
        """
        alone = self._keeps_to_one(family, values)
        if (cached := self._cached_plan(program, family, values, (proposed, alone))) is not None:
            return cached
        self._stats.plans_made += 1
        plan = self._make(program, family, proposed, alone)
        family.plans.append(plan)
        del family.plans[:-VARIANTS_LIMIT]
        self._recent.append((plan, program))
        if (profile := plan.profile) is not None:
            self._earlier.note_plan(plan, program, profile.residency, profile.lineage)
        return plan, self.derived.extended(plan, values)

    def _cached_plan(
        self, program: Program, family: ProgramFamily, values: Sequence[int], choice: tuple[int | None, bool]
    ) -> tuple[PooledPlan, Sequence[int]] | None:
        """Return a valid cached plan and the values of this run, or None if no cached plan is valid.

        `choice`: values that the plan's `proposed` and `alone` must have.
        """
        for plan in reversed(family.plans):
            if (plan.proposed, plan.alone) != choice or plan.link_changes != self.link_changes:
                continue
            if not (plan.crowded or self._has_room(plan)):
                continue
            if plan.rewrite is not None and not plan.rewrite.holds_for(program):
                continue
            run_values = self.derived.extended(plan, values)
            if plan.holds_for(program, run_values, self._locations, self.random):
                self._stats.plans_reused += 1
                self._recent.append((plan, program))
                return plan, run_values
        return None

    def _keeps_to_one(self, family: ProgramFamily, values: Sequence[int]) -> bool:
        """Return True if a trial runs the program on one executor in this run, although the policy would divide it."""
        trials, placements = family.trial, self._rules.placements
        if trials is None or placements is None:
            return False
        if trials.link_changes != self.link_changes:
            placements.forget(trials)
            family.trial = None
            return False
        undecided = not trials.settled
        alone = not placements.choose(trials)
        if alone and undecided and trials.settled:  # copies were kept until now
            self._free(self._locations.end_copies(values))
        return alone

    def _make(self, program: Program, family: ProgramFamily, proposed: int | None, alone: bool) -> PooledPlan:
        graph = Graph(program)
        has_trials = self._rules.placements is not None
        # Programs that depend on each other have no separate time, so a trial of one program is impossible.
        together = alone or (has_trials and proposed is not None and family.trial is None)
        inputs = self.inputs(graph, self._stream(graph, family, proposed), 1.0 if together else self.margin)
        planning = partial(self._plan, graph)
        with modes_as_before(), interrupt_mask.unmasked():
            if has_trials and not together:
                result, alone = self._divided_or_not(family, program, inputs, planning)
            else:
                result = planning(inputs)
        plan = self._lowered(program, graph, result)
        if plan is None:
            return self._make(program, family, proposed, alone)
        plan.alone = alone
        if self._rules.learns_margin:
            self._watch(plan)
        if proposed is not None:
            follows = result.plan is not None and result.plan.by_turn
            family.record_plan(plan, proposed, follows)
            plan.proposed = proposed if follows else None
        return plan

    def inputs(self, graph: Graph, stream: Stream, margin: float) -> PlanningInputs:
        """Collect the facts on which the plan of a program depends.

        Args:
            graph: the program.
            stream: pending programs of its structure.
            margin: share of the time that several devices must be predicted to save.
        """
        names, locations, program = self.devices, self._locations, graph.program
        inputs = {v: names[e] for v, e in resident(program, graph, locations, self.random).items()}
        copies_by_value = {v: locations.copies(v) for v in graph.inputs}
        copies = {v: tuple(names[e] for e in sorted(holders)) for v, holders in copies_by_value.items() if holders}
        residencies = self._earlier.residency(program)
        return PlanningInputs(inputs, copies, stream, self.derived.places, self._occupied(graph), residencies, margin)

    def _lowered(self, program: Program, graph: Graph, result: PipelineResult) -> PooledPlan | None:
        """Convert the result of the stages to a plan with steps.

        Return None if values derived from weights were missing. They are computed now, and the caller must plan again.
        """
        assert result.schedule is not None
        assert result.placement is not None
        rewritten = result.schedule.rewritten
        if rewritten is not None and self.derived.make_missing(rewritten, result.placement.values):
            return None  # plan again, now that the derived values have a location
        names = {} if rewritten is None else self.derived.names(rewritten)
        executors = {name: number for number, name in enumerate(self.devices)}
        homes = {value: executors[device] for value, device in result.placement.values.items()}
        program_placement = ProgramPlacement(result.graph, homes, executors, result.schedule, graph, names)
        plan = build_plan(program_placement, self._locations, self.random)
        plan.link_changes = self.link_changes
        plan.relied = plan_dependencies(program, result, self._rules.unsure)
        plan.profile = result.recorded_profile or result.profile
        plan.crowded = not self._has_room(plan)  # then no other plan fits either
        runs = list(plan.runs())
        if len(runs) == 1 and result.costs is not None:
            rows = result.costs.by_device
            runs[0].prepared.predicted_seconds = sum(rows[d.device][d.node].seconds for d in result.placement.decisions)
        return plan

    def _divided_or_not(
        self,
        family: ProgramFamily,
        program: Program,
        inputs: PlanningInputs,
        plan: Callable[[PlanningInputs], PipelineResult],
    ) -> tuple[PipelineResult, bool]:
        """Return the result of the stages, and True if a trial keeps the program on one executor.

        If the policy divides a program for the first time, begin a trial: the program runs on one executor first, if it fits.

        Args:
            family: the program's family.
            program: the program.
            inputs: facts for planning.
            plan: function that runs the stages.
        """
        result, trials = plan(inputs), family.trial
        if trials is None and _is_divided(result):
            undivided = plan(attrs.evolve(inputs, margin=1.0))
            if not _is_divided(undivided):
                family.trial = TriedPlacement(program, self.link_changes)
                return undivided, True
        elif trials is not None and _is_divided(result):
            trials.moving += _moving_seconds(result, inputs)
        elif trials is not None:  # after its inputs have a location, the policy no longer divides it
            trials.settled, trials.pays = True, False
            return result, True
        return result, False

    @property
    def margin(self) -> float:
        """Return the share of a program's time that several executors must be predicted to save before they are used."""
        if not self._rules.learns_margin:
            return MARGIN
        return margin_of(self.errors.found, calibrated=self.calibrated)

    def _watch(self, plan: PooledPlan) -> None:
        """Record the prediction error of the plan's first runs, if one executor runs the whole program."""
        runs = list(plan.runs())
        if len(runs) == 1 and (predicted := runs[0].prepared.predicted_seconds) is not None:
            self.errors.watch(runs[0].prepared, predicted)

    def _has_room(self, plan: PooledPlan) -> bool:
        """Return True if the plan's results fit on each executor in addition to the values that it holds now."""
        bytes_held = self._locations.held
        for executor, nbytes in plan.leaves:
            room = self.memory[executor]
            if room is not None and bytes_held[executor] + nbytes > room:
                return False
        return True

    def _occupied(self, graph: Graph) -> dict[str, MemoryInUse]:
        """Return, for each device, the bytes in use, and the part of them that the program does not use."""
        bytes_held, bytes_of_program = (
            self._locations.held,
            self._locations.held_of({storage_of(v) for v in graph.inputs}),
        )
        return {
            name: MemoryInUse(bytes_held[e], bytes_held[e] - bytes_of_program[e]) for e, name in enumerate(self.devices)
        }

    def _stream(self, graph: Graph, family: ProgramFamily, proposed: int | None) -> Stream:
        if proposed is None:
            return ALONE
        carried = family.new_inputs(graph.inputs, self._locations)
        return Stream(len(family.under_way) or 1, self.devices[proposed], carried)

    @property
    def last_profile(self) -> WorkloadProfile | None:
        """Return the workload profile of the last submitted program, or None."""
        return self._recent[-1][0].profile if self._recent else None


def _is_divided(result: PipelineResult) -> bool:
    """Return True if several executors run parts of the program."""
    return result.placement is not None and len({d.device for d in result.placement.decisions}) > 1


def _moving_seconds(result: PipelineResult, inputs: PlanningInputs) -> float:
    """Return the predicted seconds of a plan's transfers of inputs. A move counts twice, there and back."""
    placement, seconds = result.placement, 0.0
    assert placement is not None
    for value, home in inputs.resident.items():
        nbytes = result.graph.meta(value).nbytes if value in result.graph.inputs else 0
        new = set(placement.copies.get(value, ())) - set(inputs.copies.get(value, ()))
        seconds += sum(result.topology.link(home, device).transfer_seconds(nbytes) for device in new)
        if (target := placement.values.get(value, home)) != home:
            seconds += result.topology.link(home, target).transfer_seconds(nbytes)
            seconds += result.topology.link(target, home).transfer_seconds(nbytes)
    return seconds
