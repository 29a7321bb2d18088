"""Recognise networks that compute relative position biases for attention (Swin v2). They read no data."""

from __future__ import annotations

from djinn.planning import FUSED_ATTENTION, SOFTMAX, Graph, Node, is_backward, is_given
from djinn_patterns.transformer.layers import MIXING

_SUMS = frozenset({"add", "add_"})
_SHAPING = frozenset({
    *_SUMS, "constant_pad_nd", "div", "exp", "gather", "index", "index_select", "masked_fill", "mul", "mul_", "neg", "roll", "sigmoid",
    "tanh", "where",
})  # fmt: skip
_OPERANDS = 3  # queries, keys and values; the next operand is added to the scores
_REACH = 24  # maximum number of ops between the network and the softmax
_NEAR = 8  # maximum number of sources between scores and their product


def scores_places(graph: Graph, data: int, end: int) -> bool:
    """Return True if the network from `data` to the node `end` is only used as a bias of attention scores."""
    if not is_given(graph.flow, data):
        return False
    todo, visited, added = [end], {end}, False
    while todo and len(visited) < _REACH:
        source = todo.pop()
        for index in graph.flow.users(source):
            node = graph.nodes[index]
            if index in visited or is_backward(node):
                continue
            visited.add(index)
            if _adds_to_scores(graph, node, source):
                added = True
            elif node.operation in _SHAPING:
                todo.append(index)
            else:
                return False
    return added and not todo


def _adds_to_scores(graph: Graph, node: Node, source: int) -> bool:
    """Return True if an attention, fused or not, adds the value of `source` to its scores."""
    flow = graph.flow
    operands = flow.operands(node)
    if node.operation in FUSED_ATTENTION:
        return source not in operands[:_OPERANDS]
    if node.operation not in _SUMS:
        return False
    other_operands = [s for s in operands if s != source]
    products = any(
        s >= 0 and graph.nodes[s].operation in MIXING for o in other_operands for s in flow.ancestors(o, limit=_NEAR)
    )
    return products and any(
        graph.nodes[i].operation in SOFTMAX for i in flow.descendants(node.id, SOFTMAX | MIXING, limit=_NEAR)
    )
