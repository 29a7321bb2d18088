"""Pipeline scheduling: each device runs the ready step that is earliest in the program, so the oldest micro-batch goes first."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import NodePriority, Scheduler, SchedulingContext, hookimpl
from djinn.planning import SchedulingStrategy

djinn_api_version = "2.0"


class Pipeline(Scheduler):
    """Scheduler for devices that hold successive stages of a model: they work on successive inputs concurrently.

    A loop with a forward and backward pass per micro-batch gives the schedule 1F1B: older steps go first, and the
    backward pass of a micro-batch runs between the forward passes of later micro-batches.
    """

    name = "pipeline"
    strategy = SchedulingStrategy.PIPELINE
    tolerates_growth = True

    def priority(self, context: SchedulingContext) -> NodePriority:
        """Return the ids of the nodes as their priorities."""
        del context
        return NodePriority(lambda node: node, "the ready step that is earliest in the program")


@hookimpl
def djinn_register_schedulers() -> Iterable[Scheduler]:
    """Return the scheduler `pipeline`."""
    return [Pipeline()]
