"""Distinguish caches of self-attention and of cross-attention."""

from __future__ import annotations

from typing import Literal

from djinn.planning import Graph, layer_at
from djinn_core.planning.matching.attentions import Attention
from djinn_kv_cache.caches import Kind

_LAYERS = frozenset({"addmm", "linear", "matmul", "mm"})
_ATTENDING = frozenset({
    "_scaled_dot_product_flash_attention_for_cpu", "_softmax", "embedding", "scaled_dot_product_attention", "softmax",
})  # fmt: skip
_REACH = 48  # ops that lead to a query or a key


def attends(graph: Graph, read: Attention, kind: Kind) -> Literal["self", "cross"]:
    """`self` if queries and keys were projected from the same input, or keys are appended step by step; else `cross`."""
    if kind == "appended":
        return "self"
    if kind == "read":
        return "cross"
    asks, asked = (_projected(graph, value) for value in (read.query, read.key))
    return "cross" if asks and asked and not asks & asked else "self"


def _projected(graph: Graph, value: int) -> set[int]:
    """Inputs of the projections that lead to `value`."""
    flow = graph.flow
    found = set()
    for at in flow.ancestors(flow.source(value), _ATTENDING, _REACH):
        node = flow.node(at)
        if node is not None and node.operation in _LAYERS and (layer := layer_at(graph, node)) is not None:
            found.add(flow.beyond(layer.data))
    return found
