"""Dead code: found by walking back from what is kept."""

from __future__ import annotations

from djinn.planning import Graph, Node, OptimizationPlan, storage_of


def dead_nodes(graph: Graph, plan: OptimizationPlan, kept: frozenset[int]) -> frozenset[int]:
    """Ids of the nodes of `plan` that can be left out.

    A node lives if it is random, is there for its effect, makes a value that is kept or used by a living node, or writes
    memory that outlives the program or that a living node looks into later.
    """
    needed = set(kept)
    storages = {storage_of(v) for v in (*kept, *graph.inputs)}
    dead: set[int] = set()
    for node_id in reversed(plan.nodes):
        node = graph.nodes[node_id]
        if not _lives(node, needed, storages):
            dead.add(node_id)
            continue
        for value in node.inputs:
            used = plan.replace.get(value, value)
            needed.add(used)
            storages.add(storage_of(used))
    return frozenset(dead)


def _lives(node: Node, needed: set[int], storages: set[int]) -> bool:
    has_effect = not node.outputs and not node.writes
    return (
        node.random
        or has_effect
        or any(v in needed for v in node.outputs)
        or any(storage_of(v) in storages for v in node.writes)
    )
