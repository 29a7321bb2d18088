"""Find dead code: nodes without side effects on which no value that outlives the program depends."""

from __future__ import annotations

from djinn.planning import Graph, Node, OptimizationPlan, storage_of


def dead_nodes(graph: Graph, plan: OptimizationPlan, kept_values: frozenset[int]) -> frozenset[int]:
    """Return the ids of the nodes in `plan` that can be removed. `kept_values`: values that outlive the program.

    A node is live if it has a side effect or draws random numbers. It is also live if it computes a value in `kept_values` or a
    value that a live node uses. It is also live if it writes memory of an input, of a value in `kept_values`, or of an operand
    of a later live node.
    """
    live = set(kept_values)
    storages = {storage_of(v) for v in (*kept_values, *graph.inputs)}
    dead: set[int] = set()
    for node_id in reversed(plan.nodes):
        node = graph.nodes[node_id]
        if not _is_live(node, live, storages):
            dead.add(node_id)
            continue
        for value in node.inputs:
            source = plan.replace.get(value, value)
            live.add(source)
            storages.add(storage_of(source))
    return frozenset(dead)


def _is_live(node: Node, live_values: set[int], live_storages: set[int]) -> bool:
    has_effect = not node.outputs and not node.writes
    return (
        node.random
        or has_effect
        or any(v in live_values for v in node.outputs)
        or any(storage_of(v) in live_storages for v in node.writes)
    )
