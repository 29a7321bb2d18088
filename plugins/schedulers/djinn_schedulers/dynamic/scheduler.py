"""Several orders are tried against the clock and the memory of simulated devices, and the one that fits is taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from djinn.hooks import DoesNotFit, ExecutionSchedule, SchedulingContext, SchedulingStrategy
from djinn.scheduling import Dependences, Timeline, made_in_order, memory_peaks, ready_order, simulate
from djinn_schedulers.dynamic.frugal import frugal_order


class Dynamic:
    """The quickest order that keeps to `memory_limits`; with a `latency_target`, the one of those in time that holds least."""

    name = "dynamic"
    tolerates_growth = True

    def schedule(self, context: SchedulingContext) -> ExecutionSchedule:
        """Steps in the order that was chosen; the reasons name the others with their figures.

        Raises:
            DoesNotFit: no order meets the memory limits.
        """
        tried = [_TriedOrder.of(context, name, made) for name, made in _orders(context, self.name)]
        allowed = [t for t in tried if t.excess <= 0]
        if not allowed:
            best = min(tried, key=lambda t: t.excess)
            raise DoesNotFit(
                f"no order keeps to the limits of memory: {best.told()}, {best.excess:,} bytes more than allowed; "
                "recompute or move what is kept, or use more devices"
            )
        target = context.latency_target
        in_time = [t for t in allowed if t.line.seconds <= target]
        chosen = min(in_time, key=lambda t: t.peak) if in_time else min(allowed, key=lambda t: t.line.seconds)
        why = "the least memory of those in time" if in_time else "the quickest that keeps to the limits"
        others = "; ".join(t.told() for t in tried if t is not chosen)
        reasons = (*chosen.made.reasons, f"{chosen.told()}: {why} (tried as well: {others})")
        return attrs.evolve(chosen.made, reasons=reasons)


def _orders(context: SchedulingContext, scheduler: str) -> Iterator[tuple[str, ExecutionSchedule]]:
    nodes, found = context.plan.nodes, Dependences.of(context)
    left = found.remaining(nodes)
    orders: Mapping[str, Sequence[int]] = {
        "program order": nodes,
        "most still depends on it": ready_order(nodes, found, lambda node: -left[node]),
        "oldest first": ready_order(nodes, found, lambda node: node),
        "least memory": frugal_order(context, nodes, found),
    }
    for name, order in orders.items():
        yield name, made_in_order(context, order, found, SchedulingStrategy.DYNAMIC, scheduler, name)


@attrs.frozen(eq=False)
class _TriedOrder:
    """One order, and what came of it: `excess` is by how many bytes it breaks the limit that it breaks most."""

    name: str
    made: ExecutionSchedule
    line: Timeline
    peak: int
    excess: int

    @classmethod
    def of(cls, context: SchedulingContext, name: str, made: ExecutionSchedule) -> _TriedOrder:
        peaks, limits = memory_peaks(context, made.steps), context.memory_limits
        excess = max((peaks[d] - limit for d, limit in limits.items() if d in peaks), default=0)
        return cls(name, made, simulate(context, made), max(peaks.values(), default=0), excess)

    def told(self) -> str:
        """Name and figures."""
        return f"{self.name} {self.line.seconds * 1e3:.3g} ms, {self.peak:,} bytes"
