"""Minimum cut that selects the nodes of a cone worth running: the least sum of seconds of computing and of sending."""

from __future__ import annotations

from typing import Any

from djinn_recomputation.cone import Cone

_SOURCE, _SINK = "wanted", "not run"
_NANOSECOND = 1e9  # capacities are whole numbers: floats would not add up to what they were


def cheapest(cone: Cone, weight: float) -> frozenset[int]:
    """The nodes to run, where a second of computing counts `weight` times as much as one of sending.

    A minimum cut (Stone 1977): values that are needed are on the side of the source, and so are nodes that run. A node that
    runs is cut from the sink at its price, a value from the node that could make it at the price of sending it.
    """
    import networkx as nx  # a quarter of a second, and only programs that send something large come here

    flow = nx.DiGraph()
    flow.add_nodes_from((_SOURCE, _SINK))
    for node_id, needed in cone.needs.items():
        flow.add_edge(("node", node_id), _SINK, capacity=_whole(cone.seconds[node_id] * weight))
        for value in needed:
            flow.add_edge(("node", node_id), ("value", value))  # without a capacity: it may not be cut
    made = {v: node_id for node_id, values in cone.makes.items() for v in values}
    for value, seconds in cone.sending.items():
        maker: Any = ("node", made[value]) if value in made else _SINK
        flow.add_edge(("value", value), maker, capacity=_whole(seconds))
    for value in cone.wanted:
        flow.add_edge(_SOURCE, ("value", value))
    quickest = nx.algorithms.flow.boykov_kolmogorov  # of those that networkx has, on shallow networks as these
    _, (needed, _) = nx.minimum_cut(flow, _SOURCE, _SINK, flow_func=quickest)
    return frozenset(n for n in cone.needs if ("node", n) in needed)


def _whole(seconds: float) -> int:
    return round(seconds * _NANOSECOND) + 1
