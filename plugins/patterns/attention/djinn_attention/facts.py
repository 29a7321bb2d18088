"""What can be said of an attention: heads, whether it is causal, whether it looks at itself."""

from __future__ import annotations

import math

from djinn.dataflow import COPIES, ancestors, chain, is_view, origin, query_shape
from djinn.hooks import Graph, Node
from djinn_attention.sites import Site

_PROJECTIONS = frozenset({"addmm", "convolution", "linear", "mm"})
_TRIANGLES = frozenset({"tril", "tril_indices", "triu", "triu_indices"})
_COMPARISONS = frozenset({"ge", "gt", "le", "lt"})
_COUNTED = frozenset({*COPIES, "add", "arange", "cumsum", "index", "index_select", "sub"})
_REPEATS = frozenset({*COPIES, "div", "index_select", "mul", "repeat", "repeat_interleave"})


def heads(graph: Graph, site: Site) -> int | None:
    """Number of query heads, or None where the shapes do not tell."""
    shape = query_shape(graph, site.query)
    if len(shape) == 4:
        return shape[1]
    if len(site.scores) > 3:
        return math.prod(site.scores[1:-2])
    return 1 if len(shape) == 2 else None


def queries(graph: Graph, site: Site) -> int:
    """Number of queries of each head."""
    return query_shape(graph, site.query)[-2]


def kv_heads(graph: Graph, site: Site, query_heads: int | None) -> int | None:
    """Number of key heads before they were repeated for the query heads."""
    if query_heads is None:
        return None
    ends = set(graph.meta(site.key).shape[-2:])
    shapes = [graph.meta(v).shape for v in chain(graph, site.key, _REPEATS)]
    fitting = [s[1] for s in shapes if len(s) == 4 and set(s[-2:]) == ends and query_heads % s[1] == 0]
    return min(fitting, default=query_heads)


def causal(graph: Graph, site: Site) -> bool | None:
    """Whether later keys are hidden; None where it cannot be told, as with one query or an unknown mask."""
    if queries(graph, site) == 1:
        return None
    if site.flagged_causal:
        return True
    masks = [m for m in site.masks if _differs_by_query(graph, m)]
    if any(_hides_later_keys(graph, m) for m in masks):
        return True
    return None if masks else False


def _differs_by_query(graph: Graph, mask: int) -> bool:
    """A mask that is the same for every query, such as one for padding, hides nothing in particular from any."""
    metas = [graph.meta(v) for v in chain(graph, mask)]
    return all(len(m.shape) > 1 and m.shape[-2] > 1 and m.stride[-2] != 0 for m in metas)


def _hides_later_keys(graph: Graph, mask: int) -> bool:
    """Whether it is cut out as a triangle, or compares positions that were counted up."""
    for _, node in ancestors(graph, mask):
        if node is not None and node.operation in _TRIANGLES:
            return True
        compares = node is not None and node.operation in _COMPARISONS and len(node.inputs) == 2
        if node is not None and compares and all(_is_counted(graph, v) for v in node.inputs):
            return True
    return False


def _is_counted(graph: Graph, value: int) -> bool:
    makers = [node for _, node in ancestors(graph, value, frozenset({"arange"}), limit=32)]
    made = [n for n in makers if n is not None and not is_view(n)]
    return any(n.operation == "arange" for n in made) and all(n.operation in _COUNTED for n in made)


def kind(graph: Graph, site: Site) -> str | None:
    """`self` where queries and keys are projected from the same value, `cross` where not, None where it is not seen."""
    from_query, from_key = _projected_from(graph, site.query), _projected_from(graph, site.key)
    if not from_query or not from_key:
        return None
    return "self" if from_query & from_key else "cross"


def _projected_from(graph: Graph, value: int) -> set[int]:
    """What the nearest projections before `value` project."""
    nodes = (node for _, node in ancestors(graph, value, _PROJECTIONS))
    return {origin(graph, _projected(node)) for node in nodes if node is not None and node.operation in _PROJECTIONS}


def _projected(node: Node) -> int:
    return node.inputs[1] if node.operation == "addmm" else node.inputs[0]
