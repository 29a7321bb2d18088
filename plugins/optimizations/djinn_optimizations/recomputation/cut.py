"""Minimum cut that divides a cone into nodes to recompute and values to send, in the fewest seconds together."""

from __future__ import annotations

from typing import Any

from djinn_optimizations.recomputation.cone import Cone

_SOURCE, _SINK = "wanted", "not run"
_NANOSECOND = 1e9  # capacities are integers: sums of floats would round


def cheapest(cone: Cone, weight: float) -> frozenset[int]:
    """The nodes to recompute. A second of computing counts `weight` times as much as one of sending.

    A minimum cut (Stone 1977) with the needed values and the recomputed nodes on the side of the source. Cutting a node from
    the sink costs its seconds of computing; cutting a value from the node that makes it costs the seconds of sending it.
    """
    import networkx as nx  # a quarter of a second, and only programs that send something large come here

    flow = nx.DiGraph()
    flow.add_nodes_from((_SOURCE, _SINK))
    for node_id, needed in cone.needs.items():
        flow.add_edge(("node", node_id), _SINK, capacity=_whole(cone.seconds[node_id] * weight))
        for value in needed:
            flow.add_edge(("node", node_id), ("value", value))  # no capacity: must not be cut
    made = {v: node_id for node_id, values in cone.makes.items() for v in values}
    for value, seconds in cone.sending.items():
        maker: Any = ("node", made[value]) if value in made else _SINK
        flow.add_edge(("value", value), maker, capacity=_whole(seconds))
    for value in cone.wanted:
        flow.add_edge(_SOURCE, ("value", value))
    quickest = (
        nx.algorithms.flow.boykov_kolmogorov
    )  # the fastest of networkx's algorithms on networks as shallow as these
    _, (needed, _) = nx.minimum_cut(flow, _SOURCE, _SINK, flow_func=quickest)
    return frozenset(n for n in cone.needs if ("node", n) in needed)


def _whole(seconds: float) -> int:
    return round(seconds * _NANOSECOND) + 1
