"""Recognise networks that compute relative position biases for attention, as in Swin v2, from constants."""

from __future__ import annotations

from djinn.planning import FUSED_ATTENTION, SOFTMAX, Graph, Node, is_backward, is_weight
from djinn_patterns.transformer.layers import MIXING

_SUMS = frozenset({"add", "add_"})
_SHAPING = frozenset({
    *_SUMS, "constant_pad_nd", "div", "exp", "gather", "index", "index_select", "masked_fill", "mul", "mul_", "neg", "roll", "sigmoid",
    "tanh", "where",
})  # fmt: skip
_OPERANDS = 3  # queries, keys and values of fused attention; its next operand is added to the scores
_MAX_OPS = 24  # maximum number of ops between the network and the softmax
_MAX_SOURCES = 8  # maximum number of ops between the addition to the scores and their product or softmax


def is_score_bias(graph: Graph, data: int, end: int) -> bool:
    """Return True if the result of the node `end` is only used as a bias of attention scores, and `data` is constant.

    `data`, `end`: source of the network's input, and its last node.
    """
    if not is_weight(graph.flow, data):
        return False
    todo, visited, is_added = [end], {end}, False
    while todo and len(visited) < _MAX_OPS:
        source = todo.pop()
        for index in graph.flow.users(source):
            node = graph.nodes[index]
            if index in visited or is_backward(node):
                continue
            visited.add(index)
            if _adds_to_scores(graph, node, source):
                is_added = True
            elif node.operation in _SHAPING:
                todo.append(index)
            else:
                return False
    return is_added and not todo


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
        s >= 0 and graph.nodes[s].operation in MIXING
        for o in other_operands
        for s in flow.ancestors(o, limit=_MAX_SOURCES)
    )
    return products and any(
        graph.nodes[i].operation in SOFTMAX for i in flow.descendants(node.id, SOFTMAX | MIXING, limit=_MAX_SOURCES)
    )
