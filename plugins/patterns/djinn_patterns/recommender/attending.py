"""Attention over features: weighted sums of rows that lie one below the other, each of an id of its own."""

from __future__ import annotations

from collections.abc import Iterator

from djinn.planning import Graph, Node
from djinn_patterns.recommender.feature_interaction import FeatureInteraction, told
from djinn_patterns.recommender.features import Features

ATTENTION = frozenset({
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention",
})  # fmt: skip
_SCALES = frozenset({"add", "div", "masked_fill", "mul"})
_SOFTMAX = frozenset({"_safe_softmax", "_softmax", "softmax"})
_SCALED = 4  # ops between the product and the softmax


def attending(graph: Graph, found: Features, product: Node, left: int, right: int) -> FeatureInteraction | None:
    """The product of an attention over features that lie one below the other, each of an id of its own."""
    if not found.are_below(found.of(left) & found.of(right)):
        return None
    node, passed = product, [product.id]
    for _ in range(_SCALED):
        users = [graph.nodes[u] for u in graph.flow.users(node.id)]
        node = next((n for n in users if n.operation in _SOFTMAX | _SCALES), product)
        passed.append(node.id)
        if node.operation in _SOFTMAX:
            return told("attention", found, passed, product.id, left, right)
    return None


def attended(graph: Graph, found: Features) -> Iterator[FeatureInteraction]:
    """Attentions in one op over features that lie one below the other."""
    for operation in sorted(ATTENTION):
        for place in graph.by_op.get(operation, ()):
            query, key = graph.flow.operands(graph.nodes[place])[:2]
            leads = found.of(query) & found.of(key)
            if leads and found.are_below(leads):
                yield told("attention", found, (), place, query, key)
