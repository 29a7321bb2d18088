"""Attention sites in a graph: the ops that take part, and which values are query, key and value."""

from __future__ import annotations

import math
from collections import deque

import attrs

from djinn.planning import COPIES, FUSED_ATTENTION, Graph, Node, arguments, origin

PRODUCTS = frozenset({"baddbmm", "bmm", "einsum", "matmul", "mm"})
# What may stand between the scores and the softmax: scale, mask, soft cap, casts; in place as well.
_SCORE_OPS = frozenset({
    *COPIES, "add", "baddbmm", "clamp", "clamp_min", "div", "masked_fill", "maximum", "minimum", "mul", "nan_to_num",
    "sub", "tanh", "where",
})  # fmt: skip
# What may stand between the softmax and the product with the values: dropout in all its shapes, casts.
_WEIGHT_OPS = frozenset({*COPIES, "div", "dropout", "masked_fill", "mul", "nan_to_num", "native_dropout", "where"})
_REACH = 64  # ops between a softmax and the products before and after it, those on wrong tracks included


@attrs.frozen
class Site:
    """One attention.

    Attributes:
        nodes: ids of the ops that take part, in order.
        query, key, value: what goes into the two products; the key may be transposed.
        masks: what is added to or selects among the scores.
        scores: shape of the scores, where an op makes them; without sinks.
        fused: whether it is one op.
        flagged_causal: whether the op itself was told to be causal.
        scattered: whether scores or weights lie in parts, or there is no softmax of one product.
    """

    nodes: tuple[int, ...]
    query: int
    key: int
    value: int
    masks: tuple[int, ...]
    scores: tuple[int, ...]
    fused: bool
    flagged_causal: bool = False
    scattered: bool = False


@attrs.frozen
class _ScoreProduct:
    """The product that makes the scores, the ops on the way to the softmax, and the shape before sinks were put beside."""

    product: Node
    path: tuple[int, ...]
    shape: tuple[int, ...]


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
    weighed = _weighed(graph, softmax, scored.shape[-1]) if scored is not None else None
    if scored is None or weighed is None:
        return None
    mixture, value = weighed
    query, key = scored.product.inputs[-2:]
    if _is_layer(graph, query, key, value):
        return None
    nodes = {scored.product.id, *scored.path, softmax.id, mixture.id}
    masks = _masks(graph, scored)
    return Site(tuple(sorted(nodes)), query, key, value, masks, scored.shape, fused=False)


def _scores(graph: Graph, softmax: Node, shape: tuple[int, ...]) -> _ScoreProduct | None:
    """Go back from the softmax, past ops that change scores one by one, to the nearest product of as many."""
    flow, limit = graph.flow, _REACH
    start = flow.sources[softmax.id][0]
    ways: dict[int, tuple[int, ...]] = {start: ()}
    queue = deque([start])
    while queue and limit:
        limit -= 1
        source = queue.popleft()
        if source < 0:
            continue
        node, path = graph.nodes[source], ways[source]
        operation = node.operation.removesuffix("_")
        count = math.prod(shape)
        if operation in PRODUCTS and node.outputs and graph.meta(node.outputs[0]).numel == count:
            return _ScoreProduct(node, path, shape)
        operands = flow.sources[source]
        if operation == "cat" and (narrow := _without_sinks(graph, node)) is not None:
            shape, operands = narrow, operands[:1]
        elif not flow.looks[source] and operation not in _SCORE_OPS:
            continue
        for used, value in zip(operands, node.inputs, strict=False):
            if used not in ways and graph.meta(value).numel >= math.prod(shape):
                ways[used] = (*path, source)
                queue.append(used)
    return None


def _without_sinks(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """The shape of scores to which a `cat` adds one more for each query, which attends to nothing."""
    shapes = [graph.meta(v).shape for v in node.inputs]
    if len(shapes) != 2 or len(shapes[0]) < 2 or shapes[0][:-1] != shapes[1][:-1] or shapes[1][-1] != 1:
        return None
    return shapes[0]


def _masks(graph: Graph, scored: _ScoreProduct) -> tuple[int, ...]:
    """Operands of the ops on the way that do not come from the product, but for single numbers."""
    on_the_way, flow = {scored.product.id, *scored.path}, graph.flow
    found = []
    for i in scored.path:
        node = graph.nodes[i]
        if not flow.looks[i] and node.operation != "cat":
            found += [v for v, s in zip(node.inputs, flow.sources[i], strict=True) if s not in on_the_way]
    found += scored.product.inputs[:-2]  # baddbmm adds its first operand
    return tuple(v for v in dict.fromkeys(found) if graph.meta(v).numel > 1)


def _weighed(graph: Graph, softmax: Node, keys: int) -> tuple[Node, int] | None:
    """The first product of the softmax's result with something that has a row for each key, and that something."""
    flow, limit = graph.flow, _REACH
    queue, seen = deque([softmax.id]), {softmax.id}
    while queue and limit:
        weights = queue.popleft()
        for user in flow.users(weights):
            limit -= 1
            node = graph.nodes[user]
            if node.operation in PRODUCTS and len(node.inputs) >= 2:
                operands = [flow.beyond(s) for s in flow.sources[user][-2:]]
                other = node.inputs[-1] if operands[0] == weights else node.inputs[-2]
                if operands[0] != operands[1] and keys in graph.meta(other).shape:
                    return node, other
            elif user not in seen and node.operation.removesuffix("_") in _WEIGHT_OPS:
                seen.add(user)
                queue.append(user)
    return None


def _is_layer(graph: Graph, query: int, key: int, value: int) -> bool:
    """A product with a matrix from outside is a layer with a softmax, unless the query comes from outside as well."""
    first = origin(graph, key)
    from_outside = graph.producer(first) is None and len(graph.meta(first).shape) == 2
    return from_outside and any(graph.producer(origin(graph, v)) is not None for v in (query, value))
