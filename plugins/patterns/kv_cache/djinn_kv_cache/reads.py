"""What attention reads: queries, keys and values of every attention in a graph."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from djinn.dataflow import COPIES, FUSED_ATTENTION, ancestors, query_shape, users
from djinn.hooks import Graph, Node, arguments

_PRODUCTS = frozenset({"baddbmm", "bmm", "einsum", "matmul"})
_DROPOUT = frozenset({*COPIES, "div", "dropout", "mul", "native_dropout"})


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
    makers = (node for _, node in ancestors(graph, softmax.inputs[0], _PRODUCTS, limit=64))
    before = next((n for n in makers if n is not None and n.operation in _PRODUCTS), None)
    if before is None or len(scores.shape) < 2 or graph.meta(before.outputs[0]).numel != scores.numel:
        return None
    for after, weights in users(graph, softmax.outputs[0], _DROPOUT):
        if after.operation in _PRODUCTS and after.inputs[-2] == weights:
            query, key = before.inputs[-2:]
            nodes = tuple(sorted({before.id, softmax.id, after.id}))
            return Read(nodes, query, key, after.inputs[-1], query_shape(graph, query)[-2], scores.shape[-1])
    return None
