"""Parts of what was put together: which of them an operand is, and which layers lead to it."""

from __future__ import annotations

from collections import deque

from djinn.planning import Graph, Node, is_given, layer_at
from djinn_patterns.recommender.features import LOOK_UPS, PRODUCTS, Features

_PICKS = frozenset({"index", "index_select", "masked_select"})
PUT_TOGETHER = frozenset({"cat", "stack"}) | LOOK_UPS
_WALK = 12
_FACTORS = 2


def picked(graph: Graph, node: Node, left: int, right: int) -> tuple[int, tuple[int, ...]] | None:
    """Common source of both operands, past a layer over one of them; and the ops that pick them or are the layer."""
    if left == right:
        parts = len(set(node.inputs)) > 1 and graph.nodes[left].operation in PUT_TOGETHER
        return (left, ()) if parts else None
    joints = [_part(graph, value, source) for value, source in zip(node.inputs, (left, right), strict=True)]
    (one, how, by), (other, otherwise, also) = joints
    return (one, (*by, *also)) if one == other and how != otherwise else None


def _part(graph: Graph, value: int, source: int) -> tuple[int, object, tuple[int, ...]]:
    """Source that `value` is a part of, the part, and the ops in between."""
    node = graph.nodes[source]
    layer = layer_at(graph, node)
    if layer is not None and layer.data >= 0:
        read = next(
            v for v in layer.product.inputs if graph.flow.operand(layer.product, v) == graph.flow.beyond(layer.data)
        )
        joint, part, passed = _part(graph, read, graph.flow.beyond(layer.data))
        return joint, part, (*passed, layer.product.id, node.id)
    by_pair = [v for v, s in zip(node.inputs, graph.flow.operands(node), strict=True) if not is_given(graph.flow, s)]
    if node.operation in PRODUCTS and len(node.inputs) == _FACTORS and len(by_pair) == 1:  # a matrix for each pair
        joint, part, passed = _part(graph, by_pair[0], graph.flow.operand(node, by_pair[0]))
        return joint, part, (*passed, source)
    if node.operation in _PICKS:
        return graph.flow.operands(node)[0], node.slots + tuple(node.inputs[1:]), (source,)
    return source, _view(graph, value), ()


def _view(graph: Graph, value: int) -> tuple[object, ...]:
    """Key of a view: its ops, their numbers, and the results taken."""
    taken: list[object] = []
    maker = graph.producer(value)
    while maker is not None and graph.flow.looks[maker.id] and value in maker.outputs:
        if graph.meta(value).numel < graph.meta(maker.inputs[0]).numel:
            taken.append((maker.slots, maker.outputs.index(value)))
        value = maker.inputs[0]
        maker = graph.producer(value)
    return tuple(taken)


def layers_behind(graph: Graph, found: Features, source: int) -> tuple[set[int], list[int]]:
    """Inputs of the layers that lead to `source`, and the ops on the way."""
    read: set[int] = set()
    passed: list[int] = []
    queue = deque([source])
    while queue and len(passed) < _WALK:
        current = queue.popleft()
        if current < 0 or current in passed or not found.of(current):
            continue
        node = graph.nodes[current]
        layer = layer_at(graph, node)
        if node.operation in PUT_TOGETHER:
            continue
        passed.append(current)
        if layer is not None:
            data = graph.flow.beyond(layer.data)
            read.add(data)
            queue.append(data)
        else:
            queue.extend(graph.flow.operands(node))
    return read, passed
