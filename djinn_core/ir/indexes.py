"""Logical devices that are bound to one executor: index 0 is the whole pool, index k the k-th device.

Tensors of different indexes share no memory, and an op makes and writes tensors of one index only. So nodes and values
of an index are placed on its device, independently of index 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.placement import Placement, PlacementDecision

POOL = 0  # placement policies decide about this index


def index_of_node(graph: Graph, node: Node) -> int:
    """Return the logical device of a node's results and writes.

    A node without results and writes has the device of its operands.
    """
    for values in (node.outputs, node.writes, node.inputs):
        if values:
            return graph.meta(values[0]).device
    return POOL


def bound_nodes(graph: Graph, nodes: Sequence[int]) -> dict[int, int]:
    """Return the index of each node that is bound to one device: an index above 0. Nodes of index 0 are missing."""
    graph_nodes = graph.nodes
    if not nodes or not any(meta.device for meta in graph.distinct_metas):
        return {}
    nodes_of_device = {node: index_of_node(graph, graph_nodes[node]) for node in nodes}
    return {node: index for node, index in nodes_of_device.items() if index != POOL}


def bind(graph: Graph, placement: Placement, bound: Mapping[int, int], devices: Sequence[str]) -> Placement:
    """Return the placement with nodes and values of each index above 0 moved to the device of that index.

    `bound` has the index of each bound node, as `bound_nodes` returns it. `devices[k]` belongs to index k + 1.
    """
    decisions = tuple([
        PlacementDecision(d.node, devices[bound[d.node] - 1], f"its tensors are on index {bound[d.node]}")
        if d.node in bound else d
        for d in placement.decisions
    ])  # fmt: skip
    indexes = {value: graph.meta(value).device for value in placement.values}
    values = {v: devices[indexes[v] - 1] if indexes[v] else home for v, home in placement.values.items()}
    copies = {v: tuple(d for d in holders if d != values[v]) for v, holders in placement.copies.items()}
    copies = {v: holders for v, holders in copies.items() if holders}
    return attrs.evolve(placement, decisions=decisions, values=values, copies=copies)


def only_bound(graph: Graph, nodes: Sequence[int], bound: Mapping[int, int], devices: Sequence[str]) -> Placement:
    """Return the placement of a program in which every node is bound to a device."""
    decisions = tuple(PlacementDecision(node, "", "") for node in nodes)
    values = dict.fromkeys(_values(graph, nodes), devices[0])
    return bind(graph, Placement(decisions, values, "the indexes of its tensors"), bound, devices)


def _values(graph: Graph, nodes: Sequence[int]) -> list[int]:
    graph_nodes = graph.nodes
    return [*graph.inputs, *(value for node in nodes for value in graph_nodes[node].outputs)]
