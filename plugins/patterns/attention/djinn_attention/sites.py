"""Where attention happens: the ops that take part, and which values are query, key and value."""

from __future__ import annotations

import math
from collections import deque

import attrs

from djinn.dataflow import COPIES, FUSED_ATTENTION, is_view, origin, users
from djinn.hooks import Graph, Node, arguments

_PRODUCTS = frozenset({"baddbmm", "bmm", "einsum", "matmul", "mm"})
# What may stand between the scores and the softmax: scale, mask, soft cap, casts.
_SCORE_OPS = frozenset({
    *COPIES, "add", "baddbmm", "clamp", "div", "masked_fill", "mul", "nan_to_num", "sub", "tanh", "where",
})  # fmt: skip
# What may stand between the softmax and the product with the values: dropout in all its shapes, casts.
_WEIGHT_OPS = frozenset({*COPIES, "div", "dropout", "masked_fill", "mul", "nan_to_num", "native_dropout", "where"})


@attrs.frozen
class Site:
    """One attention.

    Attributes:
        nodes: ids of the ops that take part, in order.
        query, key, value: what goes into the two products; the key may be transposed.
        masks: what is added to or selects among the scores.
        scores: shape of the scores, where an op makes them.
        fused: whether it is one op.
        flagged_causal: whether the op itself was told to be causal.
    """

    nodes: tuple[int, ...]
    query: int
    key: int
    value: int
    masks: tuple[int, ...]
    scores: tuple[int, ...]
    fused: bool
    flagged_causal: bool = False


def find(graph: Graph, node: Node) -> Site | None:
    """The attention that the fused op or softmax `node` belongs to, or None."""
    return _fused(node) if node.operation in FUSED_ATTENTION else _unfused(graph, node)


def _fused(node: Node) -> Site:
    given = arguments(node)
    query, key, value = (given.get(name, node.inputs[i]) for i, name in enumerate(("query", "key", "value")))
    masks = [given[n] for n in ("attn_mask", "attn_bias") if isinstance(given.get(n), int) and given[n] in node.inputs]
    causal = given.get("is_causal") is True
    return Site((node.id,), query, key, value, tuple(masks), (), fused=True, flagged_causal=causal)


def _unfused(graph: Graph, softmax: Node) -> Site | None:
    shape = graph.meta(softmax.inputs[0]).shape
    if len(shape) < 2 or arguments(softmax).get("dim", -1) not in {-1, len(shape) - 1}:
        return None
    scored = _scores(graph, softmax, shape)
    weighed = _weighed(graph, softmax, shape[-1])
    if scored is None or weighed is None:
        return None
    product, between, masks = scored
    mixture, value = weighed
    query, key = product.inputs[-2:]
    if _is_layer(graph, query, key, value):
        return None
    nodes = {product.id, *between, softmax.id, mixture.id}
    return Site(tuple(sorted(nodes)), query, key, value, masks, shape, fused=False)


def _scores(graph: Graph, softmax: Node, shape: tuple[int, ...]) -> tuple[Node, frozenset[int], tuple[int, ...]] | None:
    """The product that makes the scores, the ops between it and the softmax, and the masks that they bring in."""
    queue = deque([softmax.inputs[0]])
    paths: dict[int, tuple[int, ...]] = {softmax.inputs[0]: ()}
    while queue:
        value = queue.popleft()
        node, path = graph.producer(value), paths[value]
        if node is None:
            continue
        if node.operation in _PRODUCTS and graph.meta(value).numel == math.prod(shape) and node.id not in path:
            return node, frozenset(path), _masks(graph, node, path)
        if is_view(node) or node.operation in _SCORE_OPS:
            for used in node.inputs:
                if used not in paths:
                    paths[used] = (*path, node.id)
                    queue.append(used)
    return None


def _masks(graph: Graph, product: Node, path: tuple[int, ...]) -> tuple[int, ...]:
    """Operands of the ops on the way that do not come from the product."""
    on_the_way = {product.id, *path}
    brought = [v for i in path for v in graph.nodes[i].inputs if not is_view(graph.nodes[i])]
    brought += product.inputs[:-2]  # baddbmm adds its first operand
    makers = {v: graph.producer(v) for v in dict.fromkeys(brought)}
    return tuple(v for v, maker in makers.items() if maker is None or maker.id not in on_the_way)


def _weighed(graph: Graph, softmax: Node, keys: int) -> tuple[Node, int] | None:
    """The first product of the softmax's result with something that has a row for each key, and that something."""
    for node, weights in users(graph, softmax.outputs[0], _WEIGHT_OPS):
        if node.operation not in _PRODUCTS or len(node.inputs) < 2:
            continue
        left, right = node.inputs[-2:]
        if left == weights and keys in graph.meta(right).shape:
            return node, right
        if right == weights and keys in graph.meta(left).shape:
            return node, left
    return None


def _is_layer(graph: Graph, query: int, key: int, value: int) -> bool:
    """A product with a matrix from outside is a layer with a softmax, unless the query comes from outside as well."""
    first = origin(graph, key)
    from_outside = graph.producer(first) is None and len(graph.meta(first).shape) == 2
    return from_outside and any(graph.producer(origin(graph, v)) is not None for v in (query, value))
