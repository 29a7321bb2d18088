"""Where features meet: products of what different look-ups lead to, and of features with each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import attrs

from djinn.hooks import Graph, Node, arguments
from djinn.patterns import layer_at
from djinn_recommender.features import LOOK_UPS, PRODUCTS, Features

_TIMES = frozenset({"mul", "mul_"})
_LESS = frozenset({"sub", "sub_"})
_PLUS = frozenset({"add", "add_"})
_COMBINED = frozenset({"addcmul", "addcmul_"})
_SUMS = frozenset({"add", "add_", "mean", "sum"})
_PICKS = frozenset({"index", "index_select", "masked_select"})
_JOINS = frozenset({"cat", "stack"})
_PUT_TOGETHER = _JOINS | LOOK_UPS
_WALK = 12
PLACES = PRODUCTS | _TIMES | _LESS | _COMBINED


@attrs.frozen
class Meeting:
    """A place where features meet.

    Attributes:
        kind: `dot`, `pairs`, `factorisation`, `cross`, `product` or `towers`.
        at: id of the op in which they meet. nodes: ids of the ops that belong to it, in order.
        features: sources of what meets. tables: how many look-ups lead there.
    """

    kind: str
    at: int
    nodes: tuple[int, ...]
    features: tuple[int, ...]
    tables: int


def meetings(graph: Graph, found: Features) -> Iterable[Meeting]:
    """All of them, in order; products that are put together or added up are one."""
    alone = [m for node in sorted(found.leads) if (m := _meeting(graph, found, graph.nodes[node])) is not None]
    if len(found.look_ups) > 1:
        rows = (graph.nodes[u] for n in found.look_ups for u in graph.flow.users(n.id) if u not in found.leads)
        alone += [m for n in rows if n.operation in _TIMES and (m := _beside(graph, found, n)) is not None]
    return _together(graph, alone)


def _meeting(graph: Graph, found: Features, node: Node) -> Meeting | None:
    operation, count = node.operation, len(node.inputs)
    if count < 2 or operation not in PLACES:
        return None
    if operation in _COMBINED:
        return _combined(graph, found, node)
    left, right = graph.flow.operands(node)[-2:]
    if not (found.of(left) and found.of(right)):
        return None
    if operation in PRODUCTS:
        return _product(graph, found, node, left, right)
    if operation in _LESS:
        return _factorised(graph, found, node, left, right)
    return _multiplied(graph, found, node, left, right)


def _told(kind: str, found: Features, nodes: Iterable[int], at: int, *sources: int) -> Meeting:
    leads = 0
    for source in sources:
        leads |= found.of(source)
    return Meeting(kind, at, tuple(sorted({*nodes, at})), tuple(dict.fromkeys(sources)), leads.bit_count())


def _product(graph: Graph, found: Features, node: Node, left: int, right: int) -> Meeting | None:
    """Of all features with each other, or of what two groups of features lead to."""
    if left == right:
        shape = graph.meta(node.outputs[0]).shape
        if len(shape) != 3 or shape[-1] != shape[-2] or not _is_joint(graph, found, left):
            return None
        picks = [u for u in graph.flow.users(node.id) if graph.nodes[u].operation in _PICKS]
        return _told("dot", found, picks, node.id, left)
    if found.of(left) & found.of(right):
        return None
    return _told("towers", found, (), node.id, left, right)


def _is_joint(graph: Graph, found: Features, source: int) -> bool:
    """Whether several features lie side by side in it: of several look-ups, or of several ids in one."""
    if found.of(source).bit_count() > 1:
        return True
    node = graph.flow.node(source)
    return node is not None and node.operation in LOOK_UPS and len(graph.meta(node.inputs[1]).shape) > 1


def _factorised(graph: Graph, found: Features, node: Node, left: int, right: int) -> Meeting | None:
    """The square of a sum, less the sum of squares."""
    square, total = graph.nodes[left], graph.nodes[right]
    if not _is_square(graph, square) or total.operation not in _SUMS:
        return None
    summed, squares = graph.flow.operands(square)[0], graph.flow.operands(total)
    inner = graph.flow.node(summed)
    if (
        inner is None
        or inner.operation not in _SUMS
        or not all(_is_square_of_feature(graph, found, s) for s in squares)
    ):
        return None
    nodes = {square.id, total.id, inner.id, *(s for s in squares if s >= 0)}
    after = [u for u in graph.flow.users(node.id) if graph.nodes[u].operation in {"mul", "sum"}]
    return _told("factorisation", found, {*nodes, *after[:1]}, node.id, *graph.flow.operands(inner))


def _is_square_of_feature(graph: Graph, found: Features, source: int) -> bool:
    return source >= 0 and bool(found.of(source)) and _is_square(graph, graph.nodes[source])


def _is_square(graph: Graph, node: Node) -> bool:
    if node.operation in _TIMES:
        return len(set(graph.flow.operands(node))) == 1 and len(node.inputs) > 1
    return node.operation == "square" or (node.operation == "pow" and arguments(node).get("exponent") == 2)


def _multiplied(graph: Graph, found: Features, node: Node, left: int, right: int) -> Meeting | None:
    """Of two features, of picked pairs of features, of two networks over the same, or a cross."""
    if not found.of(left) & found.of(right):
        return _told("product", found, _sums_after(graph, node)[:1], node.id, left, right)
    picked = _picked(graph, node, left, right)
    if picked is not None:
        joint, picks = picked
        return _told("pairs", found, picks, node.id, joint) if _is_joint(graph, found, joint) else None
    for base, layered in ((left, right), (right, left)):
        crossed = _crossed(graph, found, node.id, base, layered)
        if crossed is not None:
            return crossed
    sums = [n for n in _sums_after(graph, node) if _is_over_last(graph, graph.nodes[n])]
    if sums and left != right and all(found.of(s).bit_count() > 1 for s in (left, right)):
        return _told("towers", found, sums[:1], node.id, left, right)
    return None


def _sums_after(graph: Graph, node: Node) -> list[int]:
    return [u for u in graph.flow.users(node.id) if graph.nodes[u].operation in {"mean", "sum"}]


def _is_over_last(graph: Graph, reduction: Node) -> bool:
    """Whether it reduces over the last dimension alone."""
    rank = len(graph.meta(reduction.inputs[0]).shape)
    given = arguments(reduction).get("dim")
    dims = given if isinstance(given, list | tuple) else (given,)
    return [d % rank for d in dims if isinstance(d, int)] == [rank - 1]


def _beside(graph: Graph, found: Features, node: Node) -> Meeting | None:
    """The product of a row that is looked up and of what anything makes of other look-ups, summed up: a score."""
    left, right = graph.flow.operands(node)[-2:]
    for row, state in ((left, right), (right, left)):
        maker = graph.flow.node(row)
        if maker is None or state < 0 or found.of(state) or maker not in found.look_ups:
            continue
        sums = [n for n in _sums_after(graph, node) if _is_over_last(graph, graph.nodes[n])]
        if sums and any(found.of(s) & ~found.of(row) for s in graph.flow.ancestors(state)):
            return _told("towers", found, sums[:1], node.id, row, state)
    return None


def _picked(graph: Graph, node: Node, left: int, right: int) -> tuple[int, tuple[int, ...]] | None:
    """What both operands are different parts of, past a layer over one of them; and the ops that pick them or are the layer."""
    if left == right:
        parts = len(set(node.inputs)) > 1 and graph.nodes[left].operation in _PUT_TOGETHER
        return (left, ()) if parts else None
    joints = [_part(graph, value, source) for value, source in zip(node.inputs, (left, right), strict=True)]
    (one, how, by), (other, otherwise, also) = joints
    return (one, (*by, *also)) if one == other and how != otherwise else None


def _part(graph: Graph, value: int, source: int) -> tuple[int, object, tuple[int, ...]]:
    """What `value` is a part of, which part, and the ops in between."""
    node = graph.nodes[source]
    layer = layer_at(graph, node)
    if layer is not None and layer.data >= 0:
        read = next(
            v for v in layer.product.inputs if graph.flow.operand(layer.product, v) == graph.flow.beyond(layer.data)
        )
        joint, part, passed = _part(graph, read, graph.flow.beyond(layer.data))
        return joint, part, (*passed, layer.product.id, node.id)
    if node.operation in _PICKS:
        return graph.flow.operands(node)[0], node.slots + tuple(node.inputs[1:]), (source,)
    return source, _view(graph, value), ()


def _view(graph: Graph, value: int) -> tuple[object, ...]:
    """How a view was taken: which ops, with which numbers, and which of their results."""
    taken: list[object] = []
    maker = graph.producer(value)
    while maker is not None and graph.flow.looks[maker.id] and value in maker.outputs:
        if graph.meta(value).numel < graph.meta(maker.inputs[0]).numel:
            taken.append((maker.slots, maker.outputs.index(value)))
        value = maker.inputs[0]
        maker = graph.producer(value)
    return tuple(taken)


def _crossed(graph: Graph, found: Features, product: int, base: int, layered: int) -> Meeting | None:
    """x0 * layer(x) + x, with or without a bias in between."""
    if not _is_joint(graph, found, base):
        return None
    read, passed = _layers_behind(graph, found, layered)
    node, nodes = product, [product]
    for _ in range(2):
        users = [graph.nodes[u] for u in graph.flow.users(node) if graph.nodes[u].operation in _PLUS]
        if not users:
            return None
        nodes.append(users[0].id)
        others = [s for s in graph.flow.operands(users[0]) if s != node]
        if others and others[0] in read:
            return _told("cross", found, (*nodes, *passed), product, base, others[0])
        if not others or others[0] >= 0:
            return None
        node = users[0].id
    return None


def _layers_behind(graph: Graph, found: Features, source: int) -> tuple[set[int], list[int]]:
    """What the layers read that lead to `source`, and the ops on the way."""
    read: set[int] = set()
    passed: list[int] = []
    queue = deque([source])
    while queue and len(passed) < _WALK:
        current = queue.popleft()
        if current < 0 or current in passed or not found.of(current):
            continue
        node = graph.nodes[current]
        layer = layer_at(graph, node)
        if node.operation in _PUT_TOGETHER:
            continue
        passed.append(current)
        if layer is not None:
            data = graph.flow.beyond(layer.data)
            read.add(data)
            queue.append(data)
        else:
            queue.extend(graph.flow.operands(node))
    return read, passed


def _combined(graph: Graph, found: Features, node: Node) -> Meeting | None:
    """A cross as one op: `addcmul(x, x0, layer(x))`."""
    added, left, right = graph.flow.operands(node)
    for base, layered in ((left, right), (right, left)):
        read, passed = _layers_behind(graph, found, layered)
        if _is_joint(graph, found, base) and added in read:
            return _told("cross", found, passed, node.id, base, added)
    return None


def _together(graph: Graph, alone: Iterable[Meeting]) -> Iterator[Meeting]:
    """With those products as one that are put side by side or added up."""
    groups: dict[int, Meeting] = {}
    for meeting in alone:
        place = _goes_to(graph, meeting) if meeting.kind in {"pairs", "product"} else None
        if place is None:
            yield meeting
        elif place in groups:
            groups[place] = _both(groups[place], meeting)
        else:
            groups[place] = meeting
    yield from groups.values()


def _goes_to(graph: Graph, meeting: Meeting) -> int | None:
    """The op that puts what a product gives beside other such."""
    users = graph.flow.users(meeting.nodes[-1])
    return next((u for u in users if graph.nodes[u].operation in _JOINS), None)


def _both(one: Meeting, other: Meeting) -> Meeting:
    nodes = tuple(sorted({*one.nodes, *other.nodes}))
    sources = tuple(dict.fromkeys((*one.features, *other.features)))
    return Meeting(one.kind, one.at, nodes, sources, max(one.tables, other.tables))
