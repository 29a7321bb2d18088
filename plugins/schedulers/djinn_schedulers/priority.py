"""Priority scheduling: each device prefers ready steps that lead to fetched values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.hooks import NodePriority, Scheduler, SchedulingContext, hookimpl
from djinn.planning import storage_of
from djinn_core.planning.stages.ordering import Dependences

djinn_api_version = "2.0"


class Priority(Scheduler):
    """Scheduler that runs ops for fetched values first, then ops with the most dependents."""

    name = "priority"
    tolerates_growth = True

    def priority(self, context: SchedulingContext) -> NodePriority:
        """Return priorities: nodes for fetched values first, then nodes with the longest remaining path.

        A group of nodes has the priority of its first node.
        """
        nodes, dependences = context.plan.nodes, Dependences.of(context)
        required = _nodes_for_fetches(context, nodes, dependences)
        remaining = dependences.remaining(nodes)
        reason = f"{len(required):,} of {len(nodes):,} nodes first, because fetched values depend on them"
        return NodePriority(
            lambda node: (node not in required, -remaining[node]), reason, group_priority=required.__contains__
        )


def _nodes_for_fetches(context: SchedulingContext, nodes: Sequence[int], dependences: Dependences) -> set[int]:
    """Return the nodes that fetched values depend on."""
    replace, graph = context.plan.replace, context.graph
    storages = {storage_of(replace.get(v, v)) for v in context.fetch}
    required: set[int] = set()
    for node_id in reversed(nodes):
        node = graph.nodes[node_id]
        if any(storage_of(v) in storages for v in (*node.outputs, *node.writes)):
            required.add(node_id)
        if node_id in required:
            required.update(dependences.before.get(node_id, ()))
    return required


@hookimpl
def djinn_register_schedulers() -> Iterable[Scheduler]:
    """Return the scheduler `priority`."""
    return [Priority()]
