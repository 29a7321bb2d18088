"""Linear attention: features of keys meet values first, and features of queries take what they need from the result."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from djinn.planning import COPIES, SOFTMAX, Gradients, Graph, Node, is_given, layer_at
from djinn_attention.sites import PRODUCTS, Site

# Functions that make features of queries and keys, one place at a time.
_FEATURES = frozenset({
    *COPIES, "_softmax", "add", "amax", "cat", "clamp", "clamp_min", "cos", "div", "elu", "exp", "gelu", "layer_norm",
    "linalg_vector_norm", "mul", "native_layer_norm", "neg", "pow", "relu", "sigmoid", "sin", "softmax", "softplus", "square", "sub",
    "sum", "tanh",
})  # fmt: skip
_SCALES = frozenset({"div", "mul"})
_NEAR = 48  # sources between an operand and the layer that it comes from


def linear_attentions(graph: Graph, taken: set[int]) -> Iterator[Site]:
    """All of them, but for those among nodes that are `taken`; each ends with the product with the features of queries."""
    flow = graph.flow
    gradients = flow.shared(Gradients)
    for operation in sorted(PRODUCTS & graph.by_op.keys()):
        for index in graph.by_op[operation]:
            node = graph.nodes[index]
            if len(node.inputs) != 2 or index in taken:
                continue
            for position in (0, 1):
                source = flow.operands(node)[position]
                scaled = source
                if source >= 0 and graph.nodes[source].operation in _SCALES:
                    scaled = next((s for s in flow.operands(graph.nodes[source]) if not is_given(flow, s)), source)
                context = flow.node(scaled)
                if context is None or context.operation not in PRODUCTS or context.id in taken or index in gradients:
                    continue
                site = _site(graph, node, 1 - position, context)
                if site is not None:
                    yield site
                    break


def _site(graph: Graph, node: Node, asking: int, context: Node) -> Site | None:
    """The attention whose products are `context`, of keys and values, and `node`, with queries as the operand `asking`."""
    flow = graph.flow
    operands = flow.operands(context)
    if len(operands) != 2 or operands[0] == operands[1]:
        return None
    query = node.inputs[asking]
    sides = [_side(graph, s) for s in (flow.operands(node)[asking], *operands)]
    if not all(side.layers for side in sides) or sides[0].layers & sides[1].layers & sides[2].layers:
        return None
    # Both meet over places: the result of the first product has none, and is as wide as features and values are.
    places = max(graph.meta(query).shape[-2:])
    shapes = [graph.meta(v).shape for v in context.inputs]
    result = graph.meta(context.outputs[0]).shape
    summed = shapes[0][-1]
    asked = graph.meta(query).shape
    if len(result) < 2 or len(asked) < 2 or (summed in result[-2:] and summed != asked[-2]):
        return None
    key, value = context.inputs
    own = {context.id, node.id}
    nodes = tuple(sorted({*own, *_normalising(graph, query, own), *(i for side in sides for i in side.softened)}))
    scores = (*asked[:-2], asked[-2], summed or places)
    return Site(nodes, query, key, value, (), scores, fused=False, scattered=True)


@attrs.frozen
class _Side:
    """The layers whose results an operand is made of, and the softmaxes on the way."""

    layers: frozenset[int] = frozenset()
    softened: frozenset[int] = frozenset()


def _side(graph: Graph, source: int) -> _Side:
    """The layers and softmaxes that an operand is made of, by functions that look at one place at a time; nothing where others take part."""
    found, softened = set[int](), set[int]()
    todo, seen = [source], {source}
    while todo:
        at = todo.pop()
        if at < 0 or not graph.nodes[at].inputs or is_given(graph.flow, at):
            continue
        node = graph.nodes[at]
        layer = layer_at(graph, node)
        if layer is not None and (node.operation == "linear" or len(graph.meta(node.inputs[-1]).shape) == 2):
            data = graph.flow.node(graph.flow.beyond(layer.data))
            onwards = (
                data is not None and data.operation in _FEATURES and layer.bias is None and node.operation != "linear"
            )
            if not onwards:
                found.add(at)
                continue
        elif node.operation == "convolution":
            found.add(at)
            continue
        elif node.operation not in _FEATURES and not _maps(graph, node):
            return _Side()
        elif node.operation in SOFTMAX:
            softened.add(at)
        if len(seen) > _NEAR:
            return _Side()
        for used in graph.flow.operands(node):
            if used not in seen:
                seen.add(used)
                todo.append(used)
    return _Side(frozenset(found), frozenset(softened))


def _maps(graph: Graph, node: Node) -> bool:
    """True if a node multiplies with given directions, the same for all places: random features."""
    operands = graph.flow.operands(node)
    return node.operation in PRODUCTS and sum(is_given(graph.flow, s) for s in operands) == 1 and len(operands) == 2


def _normalising(graph: Graph, query: int, others: set[int]) -> Iterator[int]:
    """The product of the features of queries with the sum of those of keys."""
    flow = graph.flow
    source = flow.source(query)
    for user in flow.users(source):
        node = graph.nodes[user]
        if node.operation in PRODUCTS and user not in others and len(node.inputs) == 2:
            other = next((s for s in flow.operands(node) if s != source), -1)
            if other >= 0 and graph.nodes[other].operation == "sum":
                yield user
