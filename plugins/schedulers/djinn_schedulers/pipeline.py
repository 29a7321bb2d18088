"""Each device takes, of what is ready, what came first in the program: the oldest input, or micro-batch, goes on."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import ExecutionSchedule, ScheduleMaker, SchedulingContext, SchedulingStrategy, hookimpl
from djinn.scheduling import Dependences, made_in_order, ready_order

djinn_api_version = "2.0"


class Pipeline:
    """Devices that hold successive parts of a model work on successive inputs at the same time.

    A loop over micro-batches that computes and differentiates each gives the schedule that is known as 1F1B: what is older
    goes first, and the gradients of one micro-batch run between the forward passes of the next ones.
    """

    name = "pipeline"
    tolerates_growth = True

    def schedule(self, context: SchedulingContext) -> ExecutionSchedule:
        """Steps in the order in which the devices would take them."""
        nodes, found = context.plan.nodes, Dependences.of(context)
        if len(context.placement.devices) > 1:
            nodes = tuple(ready_order(nodes, found, lambda node: node))
        reason = "of what is ready, the oldest in the program"
        return made_in_order(context, nodes, found, SchedulingStrategy.PIPELINE, self.name, reason)


@hookimpl
def djinn_register_schedulers() -> Iterable[ScheduleMaker]:
    """The scheduler `pipeline`."""
    return [Pipeline()]
