"""A scheduler for Djinn: run the ready op whose results most other ops read."""

from __future__ import annotations

from djinn.hooks import NodePriority, Scheduler, SchedulingContext, hookimpl

djinn_api_version = "2.0"


class ExampleScheduler(Scheduler):
    """Run the op with the most readers first. `djinn.configure(scheduler="example")` selects it."""

    name = "example"
    tolerates_growth = True  # the decision does not depend on the length of a sequence or cache

    def priority(self, context: SchedulingContext) -> NodePriority:
        """Return the sort key of a node: the ready node with the least key runs first."""
        graph = context.graph
        readers = {node.id: sum(len(graph.consumers(value)) for value in node.outputs) for node in graph.nodes}
        return NodePriority(lambda node: -readers[node], "the ready op with the most readers")


@hookimpl
def djinn_register_schedulers() -> list[Scheduler]:
    """Return the schedulers of this plugin."""
    return [ExampleScheduler()]
