"""Reads of attention: queries, keys and values of every attention in a graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import attrs

from djinn.planning import COPIES, FUSED_ATTENTION, Graph, Node, arguments, query_shape

_PRODUCTS = frozenset({"baddbmm", "bmm", "einsum", "matmul"})
_DROPOUT = frozenset({*COPIES, "div", "dropout", "mul", "native_dropout", "where"})
_REACH = 48  # ops between a softmax and the products before and after it, those on wrong tracks included


@attrs.frozen
class Read:
    """One attention: its nodes, what it reads, and how many queries and keys it has."""

    nodes: tuple[int, ...]
    query: int
    key: int
    value: int
    queries: int
    keys: int


def reads(graph: Graph, candidates: list[Node]) -> Iterator[Read]:
    """The attentions among `candidates`, fused ops and softmaxes between two products."""
    for node in candidates:
        read = _fused(graph, node) if node.operation in FUSED_ATTENTION else _unfused(graph, node)
        if read is not None:
            yield read


def _fused(graph: Graph, node: Node) -> Read:
    given = arguments(node)
    query, key, value = (given.get(name, node.inputs[i]) for i, name in enumerate(("query", "key", "value")))
    return Read((node.id,), query, key, value, query_shape(graph, query)[-2], graph.meta(key).shape[-2])


def _unfused(graph: Graph, softmax: Node) -> Read | None:
    scores = graph.meta(softmax.inputs[0])
    if len(scores.shape) < 2 or not scores.numel:
        return None
    # As many scores as there are weights, or one fewer for each query: a sink was put beside them.
    fitting = (scores.numel, scores.numel - scores.numel // scores.shape[-1])
    before = _before(graph, softmax, fitting)
    after = _after(graph, softmax) if before is not None else None
    if before is None or after is None:
        return None
    query, key = before.inputs[-2:]
    shape = query_shape(graph, query)
    if len(shape) < 2:
        return None  # a vector times a matrix
    keys = graph.meta(before.outputs[0]).numel * scores.shape[-1] // scores.numel
    nodes = tuple(sorted({before.id, softmax.id, after.id}))
    return Read(nodes, query, key, after.inputs[-1], shape[-2], keys)


def _before(graph: Graph, softmax: Node, fitting: tuple[int, int]) -> Node | None:
    for source in graph.flow.ancestors(graph.flow.sources[softmax.id][0], _PRODUCTS, _REACH):
        node = graph.flow.node(source)
        if node is not None and node.operation in _PRODUCTS and graph.meta(node.outputs[0]).numel in fitting:
            return node
    return None


def _after(graph: Graph, softmax: Node) -> Node | None:
    """The product of the weights with the values, with the weights on the left."""
    flow, limit = graph.flow, _REACH
    queue = deque([softmax.id])
    while queue and limit:
        weights = queue.popleft()
        for user in flow.users(weights):
            limit -= 1
            node = graph.nodes[user]
            if node.operation in _PRODUCTS:
                if len(node.inputs) > 1 and flow.beyond(flow.sources[user][-2]) == weights:
                    return node
            elif node.operation in _DROPOUT:
                queue.append(user)
    return None
