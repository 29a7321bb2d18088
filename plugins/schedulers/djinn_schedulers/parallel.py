"""Each device takes, of what is ready, that on which most still depends."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import NodePriority, Scheduler, SchedulingContext, hookimpl
from djinn.planning import SchedulingStrategy
from djinn_core.planning.stages.ordering import Dependences

djinn_api_version = "2.0"


class Parallel(Scheduler):
    """No device idles while something is ready for it; the longest way to the end of the program goes first."""

    name = "parallel"
    strategy = SchedulingStrategy.PARALLEL
    preference = 1
    tolerates_growth = True

    def priority(self, context: SchedulingContext) -> NodePriority:
        """Return the seconds from the start of each node to the end of the program, the longest first."""
        reason = "of what is ready, that on which most still depends"
        if len(context.placement.devices) == 1:  # every order takes as long
            return NodePriority(lambda node: node, reason)
        left = Dependences.of(context).remaining(context.plan.nodes)
        return NodePriority(lambda node: -left[node], reason)


@hookimpl
def djinn_register_schedulers() -> Iterable[Scheduler]:
    """The scheduler `parallel`."""
    return [Parallel()]
