"""Load balancing: choose an executor for each of several independent programs of one structure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import attrs

from djinn_client.hookspecs.routers import Executors
from djinn_client.runtime.executor_client import ExecutorClient
from djinn_core.ir.handles import storage_of
from djinn_pool.parts import PooledPlan
from djinn_pool.placement_trials import TriedPlacement
from djinn_pool.value_locations import ValueLocations


@attrs.define(eq=False)
class ProgramFamily:
    """Programs of one structure, and their plans.

    If several such programs are pending, each gets another executor, the *proposed* executor of its plan.

    Attributes:
        plans: cached plans in the order of their creation. They differ in locations of values, in scalars, and in the
            proposed executor.
        under_way: a mark for each submission with requested results for which no thread has waited.
        is_balanced: True if the policy follows proposed executors, so that plans depend on them.
        unused_proposals: executors that were proposed and that the plan did not use.
        last: the executor that was proposed or used last, or -1.
        latest: plan and values of the last program, or None.
        trial: trial of one executor against several, or None if no trial is needed.
        templates: digests of the templates that executors ran during the trial.
        is_new: True if the latest program had a template that its executor had not run before.
    """

    plans: list[PooledPlan] = attrs.field(factory=list)
    under_way: set[object] = attrs.field(factory=set)
    is_balanced: bool = True
    unused_proposals: set[int] = attrs.field(factory=set)
    last: int = -1
    latest: tuple[PooledPlan, Sequence[int]] | None = None
    trial: TriedPlacement | None = None
    templates: set[bytes] = attrs.field(factory=set)
    is_new: bool = True

    def record_run(self, plan: PooledPlan, values: Sequence[int]) -> None:
        """Record that a program of this structure was submitted by `plan`. `values`: its values in order of appearance."""
        self.latest = plan, values
        if self.trial is not None:
            templates = {part.prepared.digest for part in plan.runs()}
            self.is_new = not templates <= self.templates
            self.templates |= templates
        if plan.proposed is not None:
            self.last = plan.proposed
        elif plan.executors:
            self.last = plan.executors[0]

    def record_plan(self, plan: PooledPlan, proposed: int, follows: bool) -> None:
        """Record that `plan` was made with a proposed executor.

        Args:
            plan: the new plan.
            proposed: the proposed executor.
            follows: True if the policy follows proposed executors.
        """
        self.is_balanced = follows
        if follows and proposed not in plan.executors:
            self.unused_proposals.add(proposed)

    def new_inputs(self, inputs: Sequence[int], locations: ValueLocations) -> frozenset[int]:
        """Return the `inputs` that earlier programs computed and that the last program of this structure did not have."""
        plan, values = self.latest if self.latest is not None else (None, ())
        before = {storage_of(values[i]) for i in (plan.inputs if plan is not None else ())}
        fresh = [v for v in inputs if (s := storage_of(v)) not in before and s in locations.homes]
        return frozenset(v for v in fresh if storage_of(v) not in locations.given)

    def clock(self) -> Callable[[float], None] | None:
        """Return a function that records the seconds of the latest program in the trial.

        Return None if there is no trial, or if its verdict is final. Also return None if an executor did not know the
        template or pending programs share the executors, because the time would not be representative.
        """
        plan, _ = self.latest if self.latest is not None else (None, ())
        if self.trial is None or plan is None or self.is_new or plan.proposed is not None:
            return None
        return self.trial.clock(apart=not plan.alone)


class LoadBalancer:
    """Chooses executors by the number of their unanswered submissions."""

    def __init__(self, executors: Executors[ExecutorClient]) -> None:
        self._executors = executors
        self._unanswered: defaultdict[int, deque[int]] = defaultdict(deque)

    def record_request(self, executor: int, number: int) -> None:
        """Record that submission `number` requested a reply from an executor."""
        self._unanswered[executor].append(number)

    def propose(self, family: ProgramFamily) -> int | None:
        """Return the least loaded executor as a proposal for the next program of the family.

        Return None if the policy ignores proposals, no program of the family is pending, or fewer than two executors can be
        proposed.
        """
        if not family.is_balanced or not family.under_way:
            return None
        count = len(self._executors.members)
        candidates = [e for e in self._executors.present if e not in family.unused_proposals]
        if len(candidates) < 2:
            return None
        return min(candidates, key=lambda e: (self._load(e), (e - family.last - 1) % count))

    def _load(self, executor: int) -> int:
        unanswered, member = self._unanswered[executor], self._executors.members[executor]
        while unanswered and member.replies.has_arrived(unanswered[0]):
            unanswered.popleft()
        return len(unanswered)
