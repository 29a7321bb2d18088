"""Balance the load of independent programs: find programs that do not depend on each other, and choose an executor."""

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

    If such programs are independent, they run on the executors in turn.

    Attributes:
        plans: the plans, the latest last. They differ in locations of values, in scalars, and in the executor in turn.
        under_way: submissions with requested results for which no thread has waited.
        takes_turns: True if plans depend on the executor in turn.
        passed_over: executors in turn that plans did not use.
        last: the executor that was in turn last.
        latest: plan and values of the last program.
        tried: trials of one executor against several; None if no trial is needed.
        templates: digests of the templates that executors ran during trials.
        is_new: True if the latest program had a template that was new to its executor.
    """

    plans: list[PooledPlan] = attrs.field(factory=list)
    under_way: set[object] = attrs.field(factory=set)
    takes_turns: bool = True
    passed_over: set[int] = attrs.field(factory=set)
    last: int = -1
    latest: tuple[PooledPlan, Sequence[int]] | None = None
    tried: TriedPlacement | None = None
    templates: set[bytes] = attrs.field(factory=set)
    is_new: bool = True

    def ran(self, plan: PooledPlan, values: Sequence[int]) -> None:
        """Note that the last program of this structure ran by `plan`, with these values."""
        self.latest = plan, values
        if self.tried is not None:
            templates = {part.prepared.digest for part in plan.runs()}
            self.is_new = not templates <= self.templates
            self.templates |= templates
        if plan.turn is not None:
            self.last = plan.turn
        elif plan.executors:
            self.last = plan.executors[0]

    def planned(self, plan: PooledPlan, turn: int, follows: bool) -> None:
        """Note that `plan` was made while an executor was in turn. `follows`: True if plans depend on the turn."""
        self.takes_turns = follows
        if follows and turn not in plan.executors:
            self.passed_over.add(turn)

    def carried(self, inputs: Sequence[int], locations: ValueLocations) -> frozenset[int]:
        """Return inputs that earlier programs computed and that the last program of this structure did not use."""
        plan, values = self.latest if self.latest is not None else (None, ())
        before = {storage_of(values[i]) for i in (plan.inputs if plan is not None else ())}
        fresh = [v for v in inputs if (s := storage_of(v)) not in before and s in locations.homes]
        return frozenset(v for v in fresh if storage_of(v) not in locations.given)

    def clock(self) -> Callable[[float], None] | None:
        """Return a function that records the latest program's seconds. Return None without a trial, or during compilation."""
        plan, _ = self.latest if self.latest is not None else (None, ())
        if self.tried is None or plan is None or self.is_new or plan.turn is not None:
            return None
        return self.tried.clock(apart=not plan.alone)


class LoadBalancer:
    """Load of each executor, from the submissions that the client has sent."""

    def __init__(self, executors: Executors[ExecutorClient]) -> None:
        self._executors = executors
        self._unanswered: defaultdict[int, deque[int]] = defaultdict(deque)

    def asked(self, executor: int, number: int) -> None:
        """Note that submission `number` requested a reply from an executor."""
        self._unanswered[executor].append(number)

    def next(self, alike: ProgramFamily) -> int | None:
        """Return the least loaded executor. Return None if no program of the same structure is pending."""
        if not alike.takes_turns or not alike.under_way:
            return None
        count = len(self._executors.members)
        candidates = [e for e in self._executors.present if e not in alike.passed_over]
        if len(candidates) < 2:
            return None
        return min(candidates, key=lambda e: (self._load(e), (e - alike.last - 1) % count))

    def _load(self, executor: int) -> int:
        unanswered, member = self._unanswered[executor], self._executors.members[executor]
        while unanswered and member.replies.has_arrived(unanswered[0]):
            unanswered.popleft()
        return len(unanswered)
