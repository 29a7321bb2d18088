"""The scheduler `dynamic`: simulate time and memory of several orders, and choose an order within the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from djinn.errors import DoesNotFit
from djinn.hooks import NodePriority, Scheduler, SchedulingContext
from djinn.planning import ExecutionSchedule, SchedulingStrategy, memory_peaks, simulate
from djinn_core.planning.stages.ordering import Dependences, ready_order
from djinn_core.planning.stages.simulate import Timeline
from djinn_core.planning.stages.steps import write_steps
from djinn_schedulers.dynamic.frugal import frugal_order


class Dynamic(Scheduler):
    """Scheduler that tries a few orders, and chooses the fastest order within the `memory_limits`.

    If some of these orders meet the `latency_target`, it chooses the order with the lowest peak memory among them.
    """

    name = "dynamic"
    strategy = SchedulingStrategy.DYNAMIC
    tolerates_growth = True

    def priority(self, context: SchedulingContext) -> NodePriority:
        """Return the positions in the chosen order as priorities. The reason lists time and memory of all orders.

        Raises:
            DoesNotFit: no order meets the memory limits.
        """
        orders = [_TriedOrder.of(context, name, order) for name, order in _orders(context).items()]
        within_limits = [t for t in orders if t.excess <= 0]
        if not within_limits:
            best = min(orders, key=lambda t: t.excess)
            raise DoesNotFit(
                f"no order of the steps meets the memory limits: {best.summary()}, {best.excess:,} bytes above a limit; "
                "raise the limit, free tensors, recompute values, or use more devices"
            )
        target = context.latency_target
        in_time = [t for t in within_limits if t.timeline.seconds <= target]
        choice = min(in_time, key=lambda t: t.peak) if in_time else min(within_limits, key=lambda t: t.timeline.seconds)
        criterion = (
            "the lowest peak memory within the latency target" if in_time else "the fastest within the memory limits"
        )
        other_orders = "; ".join(t.summary() for t in orders if t is not choice)
        positions = {node: position for position, node in enumerate(choice.order)}
        reason = f"{choice.summary()}: {criterion} (other orders: {other_orders})"
        return NodePriority(positions.__getitem__, reason, strict=True)


def _orders(context: SchedulingContext) -> Mapping[str, Sequence[int]]:
    nodes, dependences = context.plan.nodes, Dependences.of(context)
    remaining = dependences.remaining(nodes)
    return {
        "program order": nodes,
        "longest path first": ready_order(nodes, dependences, lambda node: -remaining[node]),
        "oldest first": ready_order(nodes, dependences, lambda node: node),
        "least memory": frugal_order(context, nodes, dependences),
    }


@attrs.frozen(eq=False)
class _TriedOrder:
    """An order of nodes with its predicted time and memory.

    Attributes:
        name: name of the order, for users.
        peak: highest peak memory of a device, in bytes.
        excess: largest number of bytes by which a device's peak exceeds its limit; negative if all peaks are below.
    """

    name: str
    order: Sequence[int]
    timeline: Timeline
    peak: int
    excess: int

    @classmethod
    def of(cls, context: SchedulingContext, name: str, order: Sequence[int]) -> _TriedOrder:
        steps, limits = write_steps(context, order), context.memory_limits
        peaks = memory_peaks(context, steps)
        excess = max((peaks[d] - limit for d, limit in limits.items() if d in peaks), default=0)
        timeline = simulate(context, ExecutionSchedule(context.program, (), steps, context.plan.replace))
        return cls(name, order, timeline, max(peaks.values(), default=0), excess)

    def summary(self) -> str:
        """Return name, time and peak memory as text."""
        return f"{self.name} {self.timeline.seconds * 1e3:.3g} ms, {self.peak:,} bytes"
