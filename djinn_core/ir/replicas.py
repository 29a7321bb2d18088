"""Rematerialization on further devices: a node runs on several devices instead of sending its results."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.operators import OWN_OPERATORS
from djinn_core.ir.placement import Placement, PlacementDecision
from djinn_core.ir.plan import OptimizationPlan
from djinn_core.ir.profile import DataResidency, WorkloadProfile

_UNMADE = ("empty", "new_empty")  # uninitialized memory, which differs between devices
_BEYOND = "as_strided"  # the op may read beyond its operand's elements, which a copy lacks


def repeatable(node: Node) -> bool:
    """Return True if a node may run repeatedly, also on copies of its operands.

    Such a node is pure: it writes nothing, draws no random numbers, and has no effect. It reads only the elements of
    its operands.
    """
    return (
        bool(node.outputs)
        and not node.writes
        and not node.random
        and node.op not in OWN_OPERATORS
        and not node.operation.startswith((*_UNMADE, _BEYOND))
    )


def by_node(replicas: Sequence[PlacementDecision]) -> dict[int, tuple[str, ...]]:
    """Return the further devices of each node with replicas."""
    devices: dict[int, tuple[str, ...]] = {}
    for replica in replicas:
        devices[replica.node] = (*devices.get(replica.node, ()), replica.device)
    return devices


def with_replicas(graph: Graph, placement: Placement, plan: OptimizationPlan, profile: WorkloadProfile) -> Placement:
    """Return `placement` with the plan's replicas.

    After the program, devices with replicas keep copies of the weights that the replicas read.
    """
    copies, inputs, residency = dict(placement.copies), frozenset(graph.inputs), profile.residency
    for replica in plan.replicas:
        for value in [plan.replace.get(v, v) for v in graph.nodes[replica.node].inputs]:
            weight = value in inputs and residency.get(value) is DataResidency.PERSISTENT_WEIGHT
            there = (placement.values[value], *copies.get(value, ()))
            if weight and replica.device not in there:
                copies[value] = (*copies.get(value, ()), replica.device)
    return attrs.evolve(placement, replicas=plan.replicas, copies=copies)
