"""Attention that normalises by a logarithm of a sum: scores less `logsumexp` of them, in an exponential (LSH and local attention)."""

from __future__ import annotations

from collections.abc import Iterator

from djinn.planning import Gradients, Graph, Node, anything, is_given, op
from djinn_attention.sites import PRODUCTS, Site
from djinn_core.planning.matching.match_result import Found

ANCHOR = "logsumexp"
_LESS = op("sub")(anything("scores"), op(ANCHOR)(anything("scores"))["sum"])["less"]
_MIXTURE = op("exp")(_LESS)["weights"] >> op("bmm", "matmul")["mixture"]
_NEAR = 24  # sources between scores and their product


def diamonds(graph: Graph) -> Iterator[Site]:
    """Yield an attention for each product with such weights."""
    gradients = graph.flow.shared(Gradients)
    for index in sorted(i for operation in ("bmm", "matmul") for i in graph.by_op.get(operation, ())):
        found = None if index in gradients else next(_MIXTURE.ways(Found(graph, {}, {}), index), None)
        scores = _product(graph, found.names["scores"]) if found is not None else None
        if found is None or scores is None or len(graph.nodes[index].inputs) != 2:
            continue
        weights = found["weights"]
        by_weights = graph.flow.operands(found["mixture"])[0] == weights.id
        value = found["mixture"].inputs[1 if by_weights else 0]
        nodes = tuple(sorted({scores.id, *(found[part].id for part in ("sum", "less", "weights", "mixture"))}))
        query, key = scores.inputs[-2:]
        yield Site(nodes, query, key, value, (), graph.meta(weights.outputs[0]).shape, fused=False, scattered=True)


def _product(graph: Graph, scores: int) -> Node | None:
    """Return the product of computed values that scores come from."""
    for source in graph.flow.ancestors(scores, PRODUCTS, _NEAR):
        node = graph.flow.node(source)
        if node is not None and node.operation in PRODUCTS:
            given = any(is_given(graph.flow, s) for s in graph.flow.operands(node)[-2:])
            return None if given else node
    return None
