"""A scheduler for Djinn: of the ops that are ready, the one whose results most other ops read runs first."""

from __future__ import annotations

from djinn.hooks import NodePriority, Scheduler, SchedulingContext, hookimpl

djinn_api_version = "2.0"


class ExampleScheduler(Scheduler):
    """The op with the most readers goes first. Chosen with `djinn.configure(scheduler="example")`."""

    name = "example"
    tolerates_growth = True  # the decision does not depend on how long a sequence or a cache is

    def priority(self, context: SchedulingContext) -> NodePriority:
        """Return the sort key of a node: the ready node with the least key runs first."""
        graph = context.graph
        readers = {node.id: sum(len(graph.consumers(value)) for value in node.outputs) for node in graph.nodes}
        return NodePriority(lambda node: -readers[node], "the ready op with the most readers")


@hookimpl
def djinn_register_schedulers() -> list[Scheduler]:
    """The schedulers that this plugin offers."""
    return [ExampleScheduler()]
