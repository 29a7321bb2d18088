"""Each device takes, of what is ready, that on which most still depends."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import ExecutionSchedule, ScheduleMaker, SchedulingContext, SchedulingStrategy, hookimpl
from djinn.scheduling import Dependences, made_in_order, ready_order

djinn_api_version = "2.0"


class Parallel:
    """No device idles while something is ready for it; the longest way to the end of the program goes first."""

    name = "parallel"
    preference = 1
    tolerates_growth = True

    def schedule(self, context: SchedulingContext) -> ExecutionSchedule:
        """Steps in the order in which the devices would take them."""
        nodes, found = context.plan.nodes, Dependences.of(context)
        if len(context.placement.devices) > 1:
            left = found.remaining(nodes)
            nodes = tuple(ready_order(nodes, found, lambda node: -left[node]))
        reason = "of what is ready, that on which most still depends"
        return made_in_order(context, nodes, found, SchedulingStrategy.PARALLEL, self.name, reason)


@hookimpl
def djinn_register_schedulers() -> Iterable[ScheduleMaker]:
    """The scheduler `parallel`."""
    return [Parallel()]
