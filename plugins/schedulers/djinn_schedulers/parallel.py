"""Critical-path scheduling: each device runs the ready step with the longest remaining path."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import NodePriority, Scheduler, SchedulingContext, hookimpl
from djinn.planning import SchedulingStrategy
from djinn_core.planning.stages.ordering import Dependences

djinn_api_version = "2.0"


class Parallel(Scheduler):
    """Scheduler that runs the ready step with the longest path to the end first. No device idles while a step is ready."""

    name = "parallel"
    strategy = SchedulingStrategy.PARALLEL
    preference = 1
    tolerates_growth = True

    def priority(self, context: SchedulingContext) -> NodePriority:
        """Return priorities by the predicted seconds from a node's start to the end of the program, the longest first."""
        reason = "the ready step with the longest path to the end"
        if len(context.placement.devices) == 1:  # every order takes equally long
            return NodePriority(lambda node: node, reason)
        remaining = Dependences.of(context).remaining(context.plan.nodes)
        return NodePriority(lambda node: -remaining[node], reason)


@hookimpl
def djinn_register_schedulers() -> Iterable[Scheduler]:
    """Return the scheduler `parallel`."""
    return [Parallel()]
