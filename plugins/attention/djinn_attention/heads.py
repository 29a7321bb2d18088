"""Number of heads, heads per key, and head width."""

from __future__ import annotations

import math

import attrs

from djinn.planning import Graph, Node, arguments, query_shape
from djinn_attention.sites import Site

_REPEATS = frozenset({"expand", "index_select", "repeat", "repeat_interleave"})
_STEPS = 24  # views, copies and repeats between a product and what made its keys


@attrs.frozen
class Heads:
    """The numbers of an attention.

    Attributes:
        heads, kv_heads: heads of queries, and those of keys before they were repeated; None if shapes do not tell.
        head_size: how wide a query is.
        queries, keys: how many there are for each head.
    """

    heads: int | None
    kv_heads: int | None
    head_size: int
    queries: int
    keys: int

    def sharing(self, latent: bool) -> str | None:
        """Usual name of the sharing of keys between query heads."""
        if latent:
            return "latent"
        if self.heads is None:
            return None
        if self.heads == self.kv_heads:
            return "multi-head"
        return "multi-query" if self.kv_heads == 1 else "grouped-query"


def count(graph: Graph, site: Site) -> Heads:
    """Read the numbers off the shapes."""
    shape = query_shape(graph, site.query)
    heads = _heads(shape, site)
    keys = graph.meta(site.key).shape[-2] if site.fused else site.scores[-1]
    return Heads(heads, _kv_heads(graph, site, heads), shape[-1], shape[-2], keys)


def _heads(shape: tuple[int, ...], site: Site) -> int | None:
    if len(shape) == 4:
        return shape[1]
    if len(site.scores) > 3:
        return math.prod(site.scores[1:-2])
    return 1 if len(shape) == 2 else None


def _kv_heads(graph: Graph, site: Site, query_heads: int | None) -> int | None:
    if query_heads is None:
        return None
    found = {_distinct(graph, value, query_heads) for value in (site.key, site.value)}
    return min((count for count in found if query_heads % count == 0), default=query_heads)


def _distinct(graph: Graph, value: int, query_heads: int) -> int:
    """Number of heads of keys or values, before all that repeats them."""
    shape = graph.meta(value).shape
    ends = sorted(shape[-2:])
    heads = shape[1] if len(shape) == 4 else query_heads
    repeated = 1
    for _ in range(_STEPS):
        node = graph.producer(value)
        if node is None or not node.inputs:
            break
        if node.operation == "cat":
            value = node.inputs[-1]  # what is new behind what was kept
            continue
        if node.operation in _REPEATS:
            repeated *= _times(graph, node)
        elif not graph.flow.looks[node.id]:
            break
        value = node.inputs[0]
        shape = graph.meta(value).shape
        if len(shape) == 4 and shape[1] < heads and sorted(shape[-2:]) == ends:
            heads, repeated = shape[1], 1
    return max(1, heads // repeated)


def _times(graph: Graph, node: Node) -> int:
    """Number of times that an op repeats the data of one sample."""
    before, after = graph.meta(node.inputs[0]), graph.meta(node.outputs[0])
    if not before.numel:
        return 1
    if node.operation in {"index_select", "repeat_interleave"} and arguments(node).get("dim") == 0:
        return 1
    batches = after.shape[0] // before.shape[0] if len(after.shape) == len(before.shape) and before.shape[0] else 1
    return max(1, after.numel // before.numel // max(1, batches))
