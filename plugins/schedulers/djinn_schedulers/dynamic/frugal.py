"""A low-memory order: prefers ready nodes that free more bytes than they allocate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from djinn.hooks import SchedulingContext
from djinn.planning import storage_of, storage_sizes
from djinn_core.planning.stages.ordering import Dependences

_LOOKED_AT = 64  # oldest ready nodes to compare


def frugal_order(context: SchedulingContext, nodes: Sequence[int], found: Dependences) -> list[int]:
    """Return the nodes in an order that greedily holds the fewest bytes; ties keep program order."""
    graph, replace = context.graph, context.plan.replace
    inputs = {n: {storage_of(replace.get(v, v)) for v in graph.nodes[n].inputs} for n in nodes}
    outputs = {n: {storage_of(v) for v in graph.nodes[n].outputs} - inputs[n] for n in nodes}
    uses_left = Counter(storage for node in nodes for storage in (*inputs[node], *outputs[node]))
    pinned = {storage_of(v) for v in (*graph.inputs, *graph.outputs, *context.fetch)}
    sizes = storage_sizes(graph, [v for n in nodes for v in graph.nodes[n].outputs])

    def growth(node: int) -> int:
        freed = sum(sizes.get(s, 0) for s in inputs[node] if uses_left[s] == 1 and s not in pinned)
        return sum(sizes[s] for s in outputs[node]) - freed

    missing = {node: len(found.before.get(node, ())) for node in nodes}
    ready = [node for node in nodes if not missing[node]]
    order: list[int] = []
    while ready:
        node = min(sorted(ready)[:_LOOKED_AT], key=growth)
        ready.remove(node)
        order.append(node)
        uses_left.subtract((*inputs[node], *outputs[node]))
        for after in found.after.get(node, ()):
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    return order
