"""Divide a cone into nodes to recompute and values to send, so that the total time is minimal (minimum cut)."""

from __future__ import annotations

from typing import Any

from djinn_optimizations.recomputation.cone import Cone

_SOURCE, _SINK = "wanted", "not run"
_NANOSECOND = 1e9  # capacities are integers: sums of floats would round


def min_cut_nodes(cone: Cone, weight: float) -> frozenset[int]:
    """Return the nodes of a cone to recompute. A second of computing counts as much as `weight` seconds of sending.

    The result is a minimum cut (Stone 1977). The received values and the recomputed nodes are on its source side. The
    capacity of the edge from a node to the sink is the time to compute the node. The capacity of the edge from a value
    to its node is the time to send the value.
    """
    import networkx as nx  # importing takes a quarter of a second, and only programs that send large values need it

    flow = nx.DiGraph()
    flow.add_nodes_from((_SOURCE, _SINK))
    for node_id, operands in cone.needs.items():
        flow.add_edge(("node", node_id), _SINK, capacity=_nanoseconds(cone.seconds[node_id] * weight))
        for value in operands:
            flow.add_edge(("node", node_id), ("value", value))  # no capacity: the edge must not be cut
    maker_of = {v: node_id for node_id, values in cone.makes.items() for v in values}
    for value, seconds in cone.sending.items():
        end: Any = ("node", maker_of[value]) if value in maker_of else _SINK
        flow.add_edge(("value", value), end, capacity=_nanoseconds(seconds))
    for value in cone.wanted:
        flow.add_edge(_SOURCE, ("value", value))
    algorithm = nx.algorithms.flow.boykov_kolmogorov  # the fastest algorithm of networkx on such shallow networks
    _, (source_side, _) = nx.minimum_cut(flow, _SOURCE, _SINK, flow_func=algorithm)
    return frozenset(n for n in cone.needs if ("node", n) in source_side)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * _NANOSECOND) + 1
