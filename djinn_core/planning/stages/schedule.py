"""Stage 6: schedule the steps of each device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import attrs

from djinn_core.errors import DoesNotFit, InvalidStage
from djinn_core.hookspecs.schedulers import NodePriority, Scheduler, SchedulingContext
from djinn_core.ir.schedule import ExecutionSchedule, SchedulingGroup, SchedulingStrategy
from djinn_core.planning.stages.attribution import title, warn_skipped
from djinn_core.planning.stages.ordering import (
    Dependences,
    consecutive_groups,
    dependent_pairs,
    ready_order,
    staged_groups,
    strict_order,
)
from djinn_core.planning.stages.steps import write_steps
from djinn_core.planning.stages.verify_schedule import check_schedule


def schedule(context: SchedulingContext, scheduler: Scheduler, fallback: Scheduler) -> ExecutionSchedule:
    """Return the steps by the priorities of `scheduler`.

    If it fails, log a warning and return the steps of the fallback.

    Raises:
        DoesNotFit: the fallback exceeds a device's memory as well.
        InvalidStage: the fallback breaks a rule as well.
    """
    failures: tuple[str, ...] = ()
    if scheduler is not fallback:
        try:
            return _verified_schedule(context, scheduler)
        except DoesNotFit as error:
            failures = (f"{error}; {fallback.name!r} schedules this graph",)
        except Exception as error:
            failures = (
                warn_skipped("scheduler", scheduler, error, f"{fallback.name!r} schedules this graph", context.graph),
            )
    schedule = _verified_schedule(context, fallback)
    return attrs.evolve(schedule, reasons=(*failures, *schedule.reasons)) if failures else schedule


def build_schedule(context: SchedulingContext, scheduler: Scheduler) -> ExecutionSchedule:
    """Return the schedule in which nodes run by the priorities of `scheduler`, without verifying it.

    Raises:
        InvalidStage: the scheduler returned no `NodePriority`.
    """
    priority = scheduler.priority(context)
    if not isinstance(priority, NodePriority):
        raise InvalidStage(
            f"{title('scheduler', scheduler)} returned a {type(priority).__name__}; return a NodePriority"
        )
    dependences = cache(lambda: Dependences.of(context))
    order = _order(context, priority, dependences)
    groups = _groups(context, order, priority, scheduler.strategy, dependences)
    stages, devices = len({group.stage for group in groups}), len(context.placement.devices)
    return ExecutionSchedule(
        program=context.program,
        groups=groups,
        steps=write_steps(context, order),
        replace=context.plan.replace,
        equal_slots=context.plan.equal_slots,
        scheduler=scheduler.name,
        reasons=(f"{priority.reason}; {len(groups)} groups in {stages} stages on {devices} devices",),
    )


def _order(context: SchedulingContext, priority: NodePriority, dependences: Callable[[], Dependences]) -> Sequence[int]:
    nodes = context.plan.nodes
    keys = {node: priority.key(node) for node in nodes}
    if not priority.strict and len(context.placement.devices) > 1:
        return ready_order(nodes, dependences(), keys.__getitem__)
    # A single device never waits, so `strict` makes no difference. Program order respects all dependences.
    if all(not keys[later] < keys[node] for node, later in pairwise(nodes)):
        return nodes
    return strict_order(nodes, dependent_pairs(context), keys.__getitem__)


def _groups(
    context: SchedulingContext,
    order: Sequence[int],
    priority: NodePriority,
    strategy: SchedulingStrategy,
    dependences: Callable[[], Dependences],
) -> tuple[SchedulingGroup, ...]:
    if strategy is SchedulingStrategy.SEQUENTIAL or len(context.placement.devices) == 1:
        groups = consecutive_groups(context, order)
    else:
        groups = staged_groups(order, dependences())
    group_priority = priority.group_priority
    return tuple(
        SchedulingGroup(
            stage, device, tuple(nodes), strategy, group_priority(nodes[0]) if group_priority is not None else 0
        )
        for stage, device, nodes in groups
    )


def _verified_schedule(context: SchedulingContext, scheduler: Scheduler) -> ExecutionSchedule:
    schedule = build_schedule(context, scheduler)
    check_schedule(context, schedule, title("scheduler", scheduler))
    return schedule
