"""The built-in scheduler `sequential`: program order.

Values are sent as soon as they are computed and freed after their last use.
"""

from __future__ import annotations

from collections.abc import Iterable

from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.schedulers import NodePriority, Scheduler, SchedulingContext
from djinn_core.ir.schedule import SchedulingStrategy

djinn_api_version = "2.0"


class Sequential(Scheduler):
    """Scheduler that runs nodes in program order on any placement. A new stage begins when the device changes."""

    name = "sequential"
    strategy = SchedulingStrategy.SEQUENTIAL
    tolerates_growth = True

    def priority(self, context: SchedulingContext) -> NodePriority:
        """Return the priority of the nodes: a node's key is its id."""
        del context
        return NodePriority(lambda node: node, "program order", strict=True)


@hookimpl
def djinn_register_schedulers() -> Iterable[Scheduler]:
    """Register the scheduler `sequential`."""
    return [Sequential()]
