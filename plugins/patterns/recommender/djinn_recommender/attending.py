"""Attention over features: weighted sums of rows that lie one below the other, each of an id of its own."""

from __future__ import annotations

from collections.abc import Iterator

from djinn.hooks import Graph, Node, arguments
from djinn_recommender.features import Features
from djinn_recommender.meeting import Meeting, told

ATTENTION = frozenset({
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention",
})  # fmt: skip
_JOINS = frozenset({"cat", "stack"})
_SCALES = frozenset({"add", "div", "masked_fill", "mul"})
_SOFTMAX = frozenset({"_safe_softmax", "_softmax", "softmax"})
_SCALED = 4  # ops between the product and the softmax
_BATCHED = 2


def attending(graph: Graph, found: Features, product: Node, left: int, right: int) -> Meeting | None:
    """The product of an attention over features that lie one below the other, each of an id of its own."""
    if not are_below(graph, found, found.of(left) & found.of(right)):
        return None
    node, passed = product, [product.id]
    for _ in range(_SCALED):
        users = [graph.nodes[u] for u in graph.flow.users(node.id)]
        node = next((n for n in users if n.operation in _SOFTMAX | _SCALES), product)
        passed.append(node.id)
        if node.operation in _SOFTMAX:
            return told("attention", found, passed, product.id, left, right)
    return None


def attended(graph: Graph, found: Features) -> Iterator[Meeting]:
    """Attentions in one op over features that lie one below the other."""
    for operation in sorted(ATTENTION):
        for place in graph.by_op.get(operation, ()):
            query, key = graph.flow.operands(graph.nodes[place])[:2]
            leads = found.of(query) & found.of(key)
            if leads and are_below(graph, found, leads):
                yield told("attention", found, (), place, query, key)


def are_below(graph: Graph, found: Features, leads: int) -> bool:
    """Whether rows of several look-ups, or of ids of different fields in one, lie one below the other among `leads`."""
    return any(bits and bits & leads == bits for bits in _columns(graph, found))


def _columns(graph: Graph, found: Features) -> Iterator[int]:
    """Bits of look-ups whose rows are put one below the other."""
    for node in (graph.nodes[n] for n in found.leads if graph.nodes[n].operation in _JOINS):
        rank = len(graph.meta(node.outputs[0]).shape)
        below = rank > _BATCHED and arguments(node).get("dim", 0) % rank not in {0, rank - 1}
        if below and len({found.of(s) for s in graph.flow.operands(node)} - {0}) > 1:
            yield found.leads[node.id]
    for node in found.look_ups:
        maker = graph.flow.node(graph.flow.operands(node)[1])
        shifted = maker is not None and maker.operation == "add" and len(maker.inputs) > 1
        if shifted and len(graph.meta(node.inputs[1]).shape) == _BATCHED:  # each field has rows of its own
            yield found.leads[node.id]
