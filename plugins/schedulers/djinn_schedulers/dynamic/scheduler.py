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
    """Scheduler that chooses the fastest order within `memory_limits`.

    With a `latency_target`, it chooses the order with least memory that meets the target.
    """

    name = "dynamic"
    strategy = SchedulingStrategy.DYNAMIC
    tolerates_growth = True

    def priority(self, context: SchedulingContext) -> NodePriority:
        """Return the positions in the chosen order as priorities. The reason names the other orders with their figures.

        Raises:
            DoesNotFit: no order meets the memory limits.
        """
        orders = [_TriedOrder.of(context, name, order) for name, order in _orders(context).items()]
        allowed = [t for t in orders if t.excess <= 0]
        if not allowed:
            best = min(orders, key=lambda t: t.excess)
            raise DoesNotFit(
                f"no order of the steps meets the memory limits: {best.summary()}, {best.excess:,} bytes above a limit; "
                "recompute values, free tensors or use more devices"
            )
        target = context.latency_target
        in_time = [t for t in allowed if t.line.seconds <= target]
        chosen = min(in_time, key=lambda t: t.peak) if in_time else min(allowed, key=lambda t: t.line.seconds)
        why = (
            "the least memory of the orders within the latency target"
            if in_time
            else "the fastest within the memory limits"
        )
        others = "; ".join(t.summary() for t in orders if t is not chosen)
        positions = {node: position for position, node in enumerate(chosen.order)}
        reason = f"{chosen.summary()}: {why} (tried as well: {others})"
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
    """An order with its predicted time and memory.

    Attributes:
        excess: the largest number of bytes above a limit.
    """

    name: str
    order: Sequence[int]
    line: Timeline
    peak: int
    excess: int

    @classmethod
    def of(cls, context: SchedulingContext, name: str, order: Sequence[int]) -> _TriedOrder:
        steps, limits = write_steps(context, order), context.memory_limits
        peaks = memory_peaks(context, steps)
        excess = max((peaks[d] - limit for d, limit in limits.items() if d in peaks), default=0)
        line = simulate(context, ExecutionSchedule(context.program, (), steps, context.plan.replace))
        return cls(name, order, line, max(peaks.values(), default=0), excess)

    def summary(self) -> str:
        """Return name and figures."""
        return f"{self.name} {self.line.seconds * 1e3:.3g} ms, {self.peak:,} bytes"
