"""An order of nodes that needs little memory: it prefers ready nodes that free more bytes than they allocate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from djinn.hooks import SchedulingContext
from djinn.planning import storage_of, storage_sizes
from djinn_core.planning.stages.ordering import Dependences

_MAX_COMPARED = 64  # maximum number of ready nodes to compare, the oldest first


def frugal_order(context: SchedulingContext, nodes: Sequence[int], dependences: Dependences) -> list[int]:
    """Return `nodes` in an order that greedily minimizes the bytes of live values. Ties keep program order."""
    graph, replace = context.graph, context.plan.replace
    inputs = {n: {storage_of(replace.get(v, v)) for v in graph.nodes[n].inputs} for n in nodes}
    outputs = {n: {storage_of(v) for v in graph.nodes[n].outputs} - inputs[n] for n in nodes}
    uses_left = Counter(storage for node in nodes for storage in (*inputs[node], *outputs[node]))
    not_freed = {storage_of(v) for v in (*graph.inputs, *graph.outputs, *context.fetch)}
    sizes = storage_sizes(graph, [v for n in nodes for v in graph.nodes[n].outputs])

    def growth(node: int) -> int:
        freed = sum(sizes.get(s, 0) for s in inputs[node] if uses_left[s] == 1 and s not in not_freed)
        return sum(sizes[s] for s in outputs[node]) - freed

    pending_predecessors = {node: len(dependences.before.get(node, ())) for node in nodes}
    ready = [node for node in nodes if not pending_predecessors[node]]
    order: list[int] = []
    while ready:
        node = min(sorted(ready)[:_MAX_COMPARED], key=growth)
        ready.remove(node)
        order.append(node)
        uses_left.subtract((*inputs[node], *outputs[node]))
        for successor in dependences.after.get(node, ()):
            pending_predecessors[successor] -= 1
            if not pending_predecessors[successor]:
                ready.append(successor)
    return order
