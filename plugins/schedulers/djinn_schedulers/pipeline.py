"""Each device takes, of what is ready, what came first in the program: the oldest input, or micro-batch, goes on."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import NodePriority, Scheduler, SchedulingContext, hookimpl
from djinn.planning import SchedulingStrategy

djinn_api_version = "2.0"


class Pipeline(Scheduler):
    """Devices that hold successive parts of a model work on successive inputs at the same time.

    A loop over micro-batches that computes and differentiates each gives the schedule that is known as 1F1B: what is older
    goes first, and the gradients of one micro-batch run between the forward passes of the next ones.
    """

    name = "pipeline"
    strategy = SchedulingStrategy.PIPELINE
    tolerates_growth = True

    def priority(self, context: SchedulingContext) -> NodePriority:
        """Return the ids of the nodes as their keys."""
        del context
        return NodePriority(lambda node: node, "of what is ready, the oldest in the program")


@hookimpl
def djinn_register_schedulers() -> Iterable[Scheduler]:
    """The scheduler `pipeline`."""
    return [Pipeline()]
