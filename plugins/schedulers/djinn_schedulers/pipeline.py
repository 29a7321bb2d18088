"""Pipeline scheduling: each device runs the earliest ready step of the program, from the oldest micro-batch."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import NodePriority, Scheduler, SchedulingContext, hookimpl
from djinn.planning import SchedulingStrategy

djinn_api_version = "2.0"


class Pipeline(Scheduler):
    """Scheduler for devices that hold successive stages of a model and work on successive inputs concurrently.

    A loop with a forward and backward pass per micro-batch gives the schedule 1F1B: older steps run first, so the backward
    pass of a micro-batch runs between the forward passes of later micro-batches.
    """

    name = "pipeline"
    strategy = SchedulingStrategy.PIPELINE
    tolerates_growth = True

    def priority(self, context: SchedulingContext) -> NodePriority:
        """Return node ids, which increase in program order, as priorities."""
        del context
        return NodePriority(lambda node: node, "the ready step that is earliest in the program")


@hookimpl
def djinn_register_schedulers() -> Iterable[Scheduler]:
    """Return the scheduler `pipeline`."""
    return [Pipeline()]
