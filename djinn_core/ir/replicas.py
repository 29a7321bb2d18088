"""Nodes that run on a further device as well, in place of sending what they make: which of them may, and how they are kept."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.operators import OWN_OPERATORS
from djinn_core.ir.placement import Placement, PlacementDecision
from djinn_core.ir.plan import OptimizationPlan

_UNMADE = ("empty", "new_empty")  # memory as it is found, which is other memory elsewhere


def repeatable(node: Node) -> bool:
    """Whether a node makes the same wherever and however often it runs: it writes nothing, draws nothing, and has no effect."""
    return (
        bool(node.outputs)
        and not node.writes
        and not node.random
        and node.op not in OWN_OPERATORS
        and not node.operation.startswith(_UNMADE)
    )


def by_node(replicas: Sequence[PlacementDecision]) -> dict[int, tuple[str, ...]]:
    """The further devices of each node that has any."""
    found: dict[int, tuple[str, ...]] = {}
    for replica in replicas:
        found[replica.node] = (*found.get(replica.node, ()), replica.device)
    return found


def with_replicas(graph: Graph, placement: Placement, plan: OptimizationPlan) -> Placement:
    """`placement` with the plan's replicas. Their devices keep copies of the inputs that they read there."""
    copies = dict(placement.copies)
    inputs = frozenset(graph.inputs)
    for replica in plan.replicas:
        for value in [plan.replace.get(v, v) for v in graph.nodes[replica.node].inputs]:
            elsewhere = value in inputs and placement.values[value] != replica.device
            if elsewhere and replica.device not in copies.get(value, ()):
                copies[value] = (*copies.get(value, ()), replica.device)
    return attrs.evolve(placement, replicas=plan.replicas, copies=copies)
