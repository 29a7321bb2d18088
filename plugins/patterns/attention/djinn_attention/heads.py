"""How many heads there are, how many of them share keys, and how wide they are."""

from __future__ import annotations

import math

from djinn.dataflow import COPIES, is_view, query_shape
from djinn.hooks import Graph, Node, arguments
from djinn_attention.sites import Site

_REPEATS = frozenset({"expand", "index_select", "repeat", "repeat_interleave"})
_STEPS = 24  # views, copies and repeats between a product and what made its keys


def heads(graph: Graph, site: Site) -> int | None:
    """Number of query heads, or None where the shapes do not tell."""
    shape = query_shape(graph, site.query)
    if len(shape) == 4:
        return shape[1]
    if len(site.scores) > 3:
        return math.prod(site.scores[1:-2])
    return 1 if len(shape) == 2 else None


def kv_heads(graph: Graph, site: Site, query_heads: int | None) -> int | None:
    """Number of key heads before they were repeated for the query heads."""
    if query_heads is None:
        return None
    found = {_distinct(graph, value, query_heads) for value in (site.key, site.value)}
    return min((count for count in found if query_heads % count == 0), default=query_heads)


def _distinct(graph: Graph, value: int, query_heads: int) -> int:
    """How many heads of keys or values there are, before all that repeats them."""
    ends, shape = set(graph.meta(value).shape[-2:]), graph.meta(value).shape
    count = shape[1] if len(shape) == 4 else query_heads
    repeated = 1
    for _ in range(_STEPS):
        node = graph.producer(value)
        if node is None or not node.inputs:
            break
        if node.operation == "cat":
            value = node.inputs[-1]  # what is new behind what was kept
            continue
        if not (is_view(node) or node.operation in COPIES or node.operation in _REPEATS):
            break
        repeated *= _times(graph, node)
        value = node.inputs[0]
        shape = graph.meta(value).shape
        if len(shape) == 4 and set(shape[-2:]) == ends and shape[1] < count:
            count, repeated = shape[1], 1
    return max(1, count // repeated)


def _times(graph: Graph, node: Node) -> int:
    """How often an op repeats what belongs to one sample."""
    before, after = graph.meta(node.inputs[0]), graph.meta(node.outputs[0])
    if node.operation not in _REPEATS or not before.numel:
        return 1
    if node.operation in {"index_select", "repeat_interleave"} and arguments(node).get("dim") == 0:
        return 1
    batches = after.shape[0] // before.shape[0] if len(after.shape) == len(before.shape) and before.shape[0] else 1
    return max(1, after.numel // before.numel // max(1, batches))


def sharing(query_heads: int | None, key_heads: int | None, latent: bool) -> str | None:
    """What the field calls it when several query heads look at the same keys."""
    if latent:
        return "latent"
    if query_heads is None or key_heads is None:
        return None
    if query_heads == key_heads:
        return "multi-head"
    return "multi-query" if key_heads == 1 else "grouped-query"


def lengths(graph: Graph, site: Site) -> tuple[int, int]:
    """Number of queries of each head, and of the keys that each may look at."""
    keys = graph.meta(site.key).shape[-2] if site.fused else site.scores[-1]
    return query_shape(graph, site.query)[-2], keys


def head_size(graph: Graph, site: Site) -> int:
    """How wide a query is."""
    return graph.meta(site.query).shape[-1]
