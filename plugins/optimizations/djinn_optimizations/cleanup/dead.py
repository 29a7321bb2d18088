"""Find dead code: all nodes that the values which outlive the program do not depend on."""

from __future__ import annotations

from djinn.planning import Graph, Node, OptimizationPlan, storage_of


def dead_nodes(graph: Graph, plan: OptimizationPlan, kept: frozenset[int]) -> frozenset[int]:
    """Return the ids of the nodes in `plan` that can be removed. `kept`: values that outlive the program.

    A node is live if it has a side effect or draws random numbers. It is also live if it computes a kept value, or a
    value that a live node uses, or if it writes memory that is kept or that a live node reads later.
    """
    live = set(kept)
    storages = {storage_of(v) for v in (*kept, *graph.inputs)}
    dead: set[int] = set()
    for node_id in reversed(plan.nodes):
        node = graph.nodes[node_id]
        if not _lives(node, live, storages):
            dead.add(node_id)
            continue
        for value in node.inputs:
            source = plan.replace.get(value, value)
            live.add(source)
            storages.add(storage_of(source))
    return frozenset(dead)


def _lives(node: Node, needed: set[int], storages: set[int]) -> bool:
    has_effect = not node.outputs and not node.writes
    return (
        node.random
        or has_effect
        or any(v in needed for v in node.outputs)
        or any(storage_of(v) in storages for v in node.writes)
    )
