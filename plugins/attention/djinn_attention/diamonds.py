"""Attention that normalises by a logarithm of a sum: scores less `logsumexp` of them, in an exponential (LSH and local attention).

The scores are read twice, so the shape is a graph and no tree: `djinn.planning.structure` finds it. It begins with `logsumexp`,
which few programs have, so programs without it pay nothing; networkx is imported by the first program that has it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache

from djinn.planning import Gradients, Graph, Node, is_given, structure
from djinn_attention.sites import PRODUCTS, Site
from djinn_core.planning.matching.structure import Structure

ANCHOR = "logsumexp"
_SCORES = ("add", "baddbmm", "bmm", "div", "masked_fill", "matmul", "mul", "sub", "where")
_EDGES = (("scores", "sum"), ("scores", "less"), ("sum", "less"), ("less", "weights"), ("weights", "mixture"))
_NEAR = 24  # sources between scores and their product


@cache
def _shape() -> Structure:
    parts: dict[Hashable, tuple[str, ...]] = {
        "sum": (ANCHOR,),
        "scores": _SCORES,
        "less": ("sub",),
        "weights": ("exp",),
        "mixture": ("bmm", "matmul"),
    }
    return structure(
        "attention", parts, _EDGES, confidence=0.95, reason="{weights} of {less} weigh what {mixture} adds up"
    )


def diamonds(graph: Graph, candidates: Sequence[Node]) -> Iterator[Site]:
    """An attention for each `logsumexp` among the candidates that one is built around."""
    gradients = graph.flow.shared(Gradients)
    for roles in _shape().places(graph, [n for n in candidates if n.id not in gradients]):
        scores = _product(graph, roles["scores"])
        mixture, weights = roles["mixture"], roles["weights"]
        if scores is None or len(mixture.inputs) != 2:
            continue
        by_weights = graph.flow.operands(mixture)[0] == weights.id
        query, key = scores.inputs[-2:]
        nodes = tuple(sorted({scores.id, *(node.id for node in roles.values())}))
        shape = graph.meta(weights.outputs[0]).shape
        yield Site(nodes, query, key, mixture.inputs[1 if by_weights else 0], (), shape, fused=False, scattered=True)


def _product(graph: Graph, scores: Node) -> Node | None:
    """The product of computed values that scores come from."""
    for source in graph.flow.ancestors(scores.id, PRODUCTS, _NEAR):
        node = graph.flow.node(source)
        if node is not None and node.operation in PRODUCTS:
            given = any(is_given(graph.flow, s) for s in graph.flow.operands(node)[-2:])
            return None if given else node
    return None
