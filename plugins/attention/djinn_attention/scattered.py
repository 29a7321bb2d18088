"""Attention whose scores or weights lie in parts: windows, blocks, mixed heads; found from a softmax that has no plain product."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import attrs

from djinn.planning import COPIES, SOFTMAX, Graph, Node, is_given, layer_at
from djinn_attention.sites import PRODUCTS, Site

# What puts scores together, or takes weights apart, without computing.
_MOVES = frozenset({
    *COPIES, "cat", "constant_pad_nd", "copy", "copy_", "fill", "fill_", "gather", "index", "index_copy", "index_copy_", "index_put",
    "index_put_", "index_select", "pad", "roll", "scatter", "select_scatter", "slice_scatter", "stack",
})  # fmt: skip
_SCALES = frozenset({
    "add", "clamp", "clamp_min", "div", "dropout", "masked_fill", "mul", "nan_to_num", "native_dropout", "pow", "rsub", "sub", "where",
})  # fmt: skip
_BENT = frozenset({"leaky_relu", "relu", "squeeze", "sum", "tanh"})
_BACK, _AFTER = 96, 48  # ops between a softmax and the products before it, and those after it
_NEAR = 8  # ops between a sum of scores and the layers that it adds
_SAMPLES = "grid_sampler_2d"


@attrs.frozen
class _Scores:
    """The products whose results are the scores, the ops on the ways from them to the softmax, and the masks added there."""

    products: tuple[Node, ...]
    path: tuple[int, ...]


def scattered(graph: Graph, softmax: Node) -> Site | None:
    """The attention of a softmax whose scores or weights are not those of one product as they are, or None."""
    mixture = _mixture(graph, softmax)
    if mixture is None:
        return None
    scores = _products(graph, softmax)
    if scores is not None:
        query, key = scores.products[0].inputs[-2:]
        nodes = {*(p.id for p in scores.products), *scores.path, softmax.id, *mixture.nodes}
        return _site(graph, softmax, nodes, query, key, mixture.value)
    for find in (_added, _sampled):
        pair = find(graph, softmax, mixture)
        if pair is not None:
            query, key, others = pair
            return _site(graph, softmax, {*others, softmax.id, *mixture.nodes}, query, key, mixture.value)
    return None


def _site(graph: Graph, softmax: Node, nodes: Iterable[int], query: int, key: int, value: int) -> Site:
    shape = graph.meta(softmax.inputs[0]).shape
    return Site(tuple(sorted(nodes)), query, key, value, (), shape, fused=False, scattered=True)


@attrs.frozen
class _Mixture:
    """The place where weights meet values: the ops from the softmax's result on, and the values."""

    nodes: tuple[int, ...]
    value: int


def _mixture(graph: Graph, softmax: Node) -> _Mixture | None:
    """The first product of weights with computed values, or their product number by number that is summed up afterwards."""
    flow, limit = graph.flow, _AFTER
    ways: dict[int, tuple[int, ...]] = {softmax.id: ()}
    queue = deque([softmax.id])
    while queue and limit:
        weights = queue.popleft()
        for user in flow.users(weights):
            limit -= 1
            if user in ways:
                continue
            node, path = graph.nodes[user], ways[weights]
            operation = node.operation.removesuffix("_")
            other = _other(graph, node, weights)
            if operation in PRODUCTS and other is not None and not is_given(flow, other[0]):
                return _Mixture((*path, user), other[1])
            if operation == "mul" and other is not None and not is_given(flow, other[0]) and other[0] not in ways:
                sums = [u for u in flow.users(user) if graph.nodes[u].operation == "sum"]
                wider = graph.meta(other[1]).numel > graph.meta(node.inputs[0]).numel or _is_spread(
                    graph, node, other[1]
                )
                if sums and wider:
                    return _Mixture((*path, user, sums[0]), other[1])
            mixes = operation in PRODUCTS and other is not None and _mixes_heads(graph, node, softmax)
            if mixes or operation in _MOVES or operation in _SCALES or node.operation in _MOVES:
                ways[user] = (*path, user)
                queue.append(user)
    return None


def _is_spread(graph: Graph, node: Node, value: int) -> bool:
    """True if the weights have one number where values have a row."""
    weights = next((v for v in node.inputs if v != value), value)
    return weights != value and graph.meta(weights).numel < graph.meta(value).numel


def _other(graph: Graph, node: Node, source: int) -> tuple[int, int] | None:
    """The operand of `node` that is not `source`: its source and its value; None if there is none or more."""
    others = [(s, v) for s, v in zip(graph.flow.operands(node), node.inputs, strict=True) if s != source]
    return others[0] if len(others) == 1 and len(node.inputs) == 2 else None


def _mixes_heads(graph: Graph, node: Node, softmax: Node) -> bool:
    """True if a product with a small weight only mixes the heads of scores, or of weights."""
    shape = graph.meta(softmax.inputs[0]).shape
    given = [v for s, v in zip(graph.flow.operands(node), node.inputs, strict=True) if is_given(graph.flow, s)]
    if len(given) != 1 or len(shape) < 4:
        return False
    weight = graph.meta(given[0])
    scores = graph.meta(softmax.inputs[0]).numel
    return weight.numel == shape[1] ** 2 and bool(node.outputs) and graph.meta(node.outputs[0]).numel == scores


def _products(graph: Graph, softmax: Node) -> _Scores | None:
    """The products of computed values that scores are put together from, past moves, scales, masks and mixtures of heads."""
    flow, limit = graph.flow, _BACK
    start = flow.sources[softmax.id][0]
    parents: dict[int, int | None] = {start: None}
    queue, products = deque([start]), list[Node]()
    while queue and limit:
        limit -= 1
        source = queue.popleft()
        if source < 0:
            continue
        node = graph.nodes[source]
        operation = node.operation.removesuffix("_")
        if operation in PRODUCTS:
            if _mixes_heads(graph, node, softmax):
                pass
            else:
                if len(node.inputs) >= 2 and not any(is_given(flow, s) for s in flow.operands(node)[-2:]):
                    products.append(node)
                continue
        elif not (flow.looks[source] or operation in _SCALES or operation in _MOVES or node.operation in _MOVES):
            continue
        for used in flow.sources[source]:
            if used not in parents:
                parents[used] = source
                queue.append(used)
    if not products:
        return None
    path: dict[int, None] = {}
    for product in products:
        at = parents[product.id]
        while at is not None and at not in path:
            path[at] = None
            at = parents[at]
    return _Scores(tuple(products), tuple(path))


def _added(graph: Graph, softmax: Node, _: _Mixture) -> tuple[int, int, tuple[int, ...]] | None:
    """Additive scores: layers over queries and over keys are added, each to each, and bent; at most one narrow layer follows."""
    flow = graph.flow
    source, passed = flow.operands(softmax)[0], list[int]()
    while len(passed) < _NEAR:
        if source < 0:
            return None
        node = graph.nodes[source]
        operands = flow.operands(node)
        if node.operation == "add" and len(operands) == 2 and _each_to_each(graph, node):
            layers = [_layer_near(graph, s) for s in operands]
            if all(layers):
                return node.inputs[0], node.inputs[1], (*passed, source)
            return None
        layer = layer_at(graph, node)
        narrow = layer is not None and graph.meta(graph.flow.value(source)).shape[-1:] == (1,)
        if not (narrow or node.operation in _SCALES or node.operation in _BENT):
            return None
        passed.append(source)
        source = flow.beyond(layer.data) if layer is not None and narrow else operands[0]
        if node.operation == "where":
            source = next((s for s in operands[1:] if not is_given(flow, s)), -1)
    return None


def _each_to_each(graph: Graph, node: Node) -> bool:
    """True if an addition spreads both operands, or one of them over places that the other has."""
    shapes = [graph.meta(v).shape for v in node.inputs]
    result = graph.meta(node.outputs[0]).shape if node.outputs else shapes[0]
    return len(shapes[0]) == len(shapes[1]) and any(s != result for s in shapes) and 1 in (*shapes[0], *shapes[1])


def _layer_near(graph: Graph, source: int) -> bool:
    node = graph.flow.node(source)
    return node is not None and layer_at(graph, node) is not None


def _sampled(graph: Graph, softmax: Node, mixture: _Mixture) -> tuple[int, int, tuple[int, ...]] | None:
    """Deformable attention: the values are sampled where a layer says, and the weights come from a layer as well."""
    if _SAMPLES not in graph.by_op:
        return None
    flow = graph.flow
    samples = [s for s in flow.ancestors(flow.source(mixture.value), SOFTMAX, _NEAR) if _is(graph, s, _SAMPLES)]
    if not samples:
        return None
    return softmax.inputs[0], graph.nodes[samples[0]].inputs[0], tuple(samples)


def _is(graph: Graph, source: int, operation: str) -> bool:
    return source >= 0 and graph.nodes[source].operation == operation
