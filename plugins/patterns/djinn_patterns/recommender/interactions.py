"""Feature interactions: products of what different look-ups lead to, and of features with each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from djinn.planning import NORMALISATION, Graph, Node, arguments, layer_at
from djinn_patterns.recommender.attending import attended, attending
from djinn_patterns.recommender.feature_interaction import FeatureInteraction, told
from djinn_patterns.recommender.features import LOOK_UPS, PRODUCTS, Features
from djinn_patterns.recommender.parts import PUT_TOGETHER, layers_behind, picked

_TIMES = frozenset({"mul", "mul_"})
_LESS = frozenset({"sub", "sub_"})
_PLUS = frozenset({"add", "add_"})
_COMBINED = frozenset({"addcmul", "addcmul_"})
_SUMS = frozenset({"add", "add_", "mean", "sum"})
_PICKS = frozenset({"index", "index_select", "masked_select"})
_JOINS = frozenset({"cat", "stack"})
_SQUARES = frozenset({"abs", "linalg_vector_norm", "norm", "pow", "square"})
_BATCHED = 3
_MOST_PAIRS = 128  # that are added up one by one
_FORMS = frozenset({"_trilinear"})
_SCORES = PRODUCTS | _TIMES
PLACES = _FORMS | PRODUCTS | _TIMES | _LESS | _COMBINED


def interactions(graph: Graph, found: Features) -> Iterable[FeatureInteraction]:
    """All of them, in order; products that are put together or added up are one."""
    alone = [m for node in sorted(found.leads) if (m := _interaction(graph, found, graph.nodes[node])) is not None]
    alone += attended(graph, found)
    if len(found.look_ups) > 1:
        rows = (graph.nodes[u] for n in found.look_ups for u in graph.flow.users(n.id) if u not in found.leads)
        alone += [m for n in rows if n.operation in _SCORES and (m := _beside(graph, found, n)) is not None]
    return _together(graph, _outermost(graph, alone))


def _outermost(graph: Graph, alone: list[FeatureInteraction]) -> Iterable[FeatureInteraction]:
    """Without masks that another interaction multiplies once more: a gated cross is one."""
    inner = {s for m in alone if m.kind == "cross" for s in graph.flow.operands(graph.nodes[m.at])}
    return [m for m in alone if m.kind != "mask" or m.at not in inner]


def _interaction(graph: Graph, found: Features, node: Node) -> FeatureInteraction | None:
    operation, count = node.operation, len(node.inputs)
    if count < 2 or operation not in PLACES:
        return None
    if operation in _COMBINED:
        return _combined(graph, found, node)
    if operation in _FORMS:
        one, _, other = graph.flow.operands(node)  # the matrix stands between
        both = found.of(one) and found.of(other) and node.inputs[0] != node.inputs[2]
        return told("product", found, (), node.id, one, other) if both else None
    left, right = graph.flow.operands(node)[-2:]
    if not (found.of(left) and found.of(right)):
        return None
    if operation in PRODUCTS:
        return _product(graph, found, node, left, right)
    if operation in _LESS:
        return _factorised(graph, found, node, left, right) or _apart(graph, found, node, left, right)
    return _multiplied(graph, found, node, left, right)


def _product(graph: Graph, found: Features, node: Node, left: int, right: int) -> FeatureInteraction | None:
    """Of all features with each other, or of what two groups of features lead to."""
    if left == right:
        shape = graph.meta(node.outputs[0]).shape
        if len(shape) != 3 or shape[-1] != shape[-2] or not _is_joint(graph, found, left):
            return None
        picks = [u for u in graph.flow.users(node.id) if graph.nodes[u].operation in _PICKS]
        return told("dot", found, picks, node.id, left)
    if found.of(left) & found.of(right):
        if len(graph.meta(node.outputs[0]).shape) < _BATCHED and found.are_many(left) and found.are_many(right):
            return told("towers", found, (), node.id, left, right)  # of all in a batch with all
        return _compressed(graph, found, node, left, right) or attending(graph, found, node, left, right)
    return told("towers", found, (), node.id, left, right)


def _compressed(graph: Graph, found: Features, node: Node, left: int, right: int) -> FeatureInteraction | None:
    """The products of all features with mixtures of them: of what lies one below the other with one layer over it."""
    if len(graph.meta(node.outputs[0]).shape) != _BATCHED:
        return None
    for base, mixed in ((left, right), (right, left)):
        layer = layer_at(graph, graph.nodes[mixed])
        if layer is not None and graph.flow.beyond(layer.data) == base and found.are_below(found.of(base)):
            return told("dot", found, (layer.product.id, mixed), node.id, base)
    return None


def _is_joint(graph: Graph, found: Features, source: int) -> bool:
    """True if a source concatenates several features: of several look-ups, or of several ids of one look-up."""
    if found.of(source).bit_count() > 1:
        return True
    node = graph.flow.node(source)
    several = node is not None and node.operation in LOOK_UPS and len(graph.meta(node.inputs[1]).shape) > 1
    return several or found.are_below(found.of(source))


def _factorised(graph: Graph, found: Features, node: Node, left: int, right: int) -> FeatureInteraction | None:
    """The square of a sum, less the sum of squares, or the other way round."""
    for one, other in ((left, right), (right, left)):
        (square, after), (squares, total) = _before_sums(graph, one), _before_sums(graph, other)
        if not total or not _is_square(graph, graph.nodes[square]):
            continue
        inner = graph.flow.node(graph.flow.operands(graph.nodes[square])[0])
        of_features = _is_square_of_feature(graph, found, squares)
        if inner is None or inner.operation not in _SUMS or not of_features:
            continue
        ends = [u for u in graph.flow.users(node.id) if graph.nodes[u].operation in {"mul", "sum"}]
        nodes = {square, squares, inner.id, *after, *total, *ends[:1]}
        return told("factorisation", found, nodes, node.id, *graph.flow.operands(inner))
    return None


def _before_sums(graph: Graph, source: int) -> tuple[int, list[int]]:
    """Summands, and the ops that sum them; the same where nothing is."""
    passed: list[int] = []
    while graph.nodes[source].operation in _SUMS:
        inner = graph.flow.operands(graph.nodes[source])
        if inner[0] < 0:
            break
        passed.append(source)
        source = inner[0]
    return source, passed


def _apart(graph: Graph, found: Features, node: Node, left: int, right: int) -> FeatureInteraction | None:
    """The difference of two features, whose length is taken."""
    moved = [
        u for u in graph.flow.users(node.id) if graph.nodes[u].operation in _PLUS and len(graph.nodes[u].inputs) == 1
    ]
    users = (u for n in (node.id, *moved) for u in graph.flow.users(n))
    lengths = [u for u in users if graph.nodes[u].operation in _SQUARES]
    if not lengths or (found.of(left) & found.of(right) and not _are_parts(graph, found, node, left, right)):
        return None
    return told("distance", found, lengths[:1], node.id, left, right)


def _are_parts(graph: Graph, found: Features, node: Node, left: int, right: int) -> bool:
    """True if both are different features of one stack."""
    return found.are_below(found.of(left) & found.of(right)) and picked(graph, node, left, right) is not None


def _is_square_of_feature(graph: Graph, found: Features, source: int) -> bool:
    return source >= 0 and bool(found.of(source)) and _is_square(graph, graph.nodes[source])


def _is_square(graph: Graph, node: Node) -> bool:
    if node.operation in _TIMES:
        return len(set(graph.flow.operands(node))) == 1 and len(node.inputs) > 1
    return node.operation == "square" or (node.operation == "pow" and arguments(node).get("exponent") == 2)


def _multiplied(graph: Graph, found: Features, node: Node, left: int, right: int) -> FeatureInteraction | None:
    """Of two features, of picked pairs of features, of two networks over the same, or a cross."""
    if not found.of(left) & found.of(right):
        return told("product", found, _sums_after(graph, node)[:1], node.id, left, right)
    chosen = picked(graph, node, left, right)
    if chosen is not None:
        joint, picks = chosen
        after = _sums_after(graph, node)[:1]
        return told("pairs", found, (*picks, *after), node.id, joint) if _is_joint(graph, found, joint) else None
    for base, layered in ((left, right), (right, left)):
        crossed = _crossed(graph, found, node.id, base, layered)
        if crossed is not None:
            return crossed
    masked = _masked(graph, found, node, left, right)
    if masked is not None:
        return masked
    sums = [n for n in _sums_after(graph, node) if _is_over_last(graph, graph.nodes[n])]
    if sums and left != right and all(found.are_many(s) for s in (left, right)):
        return told("towers", found, sums[:1], node.id, left, right)
    return None


def _masked(graph: Graph, found: Features, node: Node, left: int, right: int) -> FeatureInteraction | None:
    """Several features side by side times a layer over them, as wide: a mask that is no gate between nothing and all."""
    sizes = {graph.meta(v).numel for v in (*node.inputs, node.outputs[0])} if node.outputs else set()
    for base, layered in ((left, right), (right, left)):
        if len(sizes) == 1 and layer_at(graph, graph.nodes[layered]) is not None:
            joint, passed = _before_norms(graph, base)
            read, layers = layers_behind(graph, found, layered)
            if joint in read and graph.nodes[joint].operation in PUT_TOGETHER and found.are_many(joint):
                return told("mask", found, (*passed, *layers), node.id, joint)
    return None


def _before_norms(graph: Graph, source: int) -> tuple[int, list[int]]:
    """Operand of a normalisation, and its ops; the same where nothing was."""
    passed: list[int] = []
    while source >= 0 and graph.nodes[source].operation in NORMALISATION:
        passed.append(source)
        source = graph.flow.operands(graph.nodes[source])[0]
    return source, passed


def _sums_after(graph: Graph, node: Node) -> list[int]:
    return [u for u in graph.flow.users(node.id) if graph.nodes[u].operation in {"mean", "sum"}]


def _is_over_last(graph: Graph, reduction: Node) -> bool:
    """True if a reduction is over the last dimension and not over samples."""
    rank = len(graph.meta(reduction.inputs[0]).shape)
    given = arguments(reduction).get("dim")
    dims = given if isinstance(given, list | tuple) else (given,)
    reduced = {d % rank for d in dims if isinstance(d, int)}
    return rank - 1 in reduced and 0 not in reduced


def _beside(graph: Graph, found: Features, node: Node) -> FeatureInteraction | None:
    """The inner product of a row that is looked up and of what anything makes of other look-ups: a score."""
    left, right = graph.flow.operands(node)[-2:]
    for row, state in ((left, right), (right, left)):
        maker = graph.flow.node(row)
        if maker is None or state < 0 or found.of(state) or maker not in found.look_ups:
            continue
        product = node.operation in PRODUCTS
        sums = [n for n in _sums_after(graph, node) if not product and _is_over_last(graph, graph.nodes[n])]
        if (sums or product) and any(found.of(s) & ~found.of(row) for s in graph.flow.ancestors(state)):
            return told("towers", found, sums[:1], node.id, row, state)
    return None


def _crossed(graph: Graph, found: Features, product: int, base: int, layered: int) -> FeatureInteraction | None:
    """x0 * layer(x) + x, with or without a bias in between."""
    if not _is_joint(graph, found, base):
        return None
    read, passed = layers_behind(graph, found, layered)
    node, nodes = product, [product]
    for _ in range(2):
        users = [graph.nodes[u] for u in graph.flow.users(node) if graph.nodes[u].operation in _PLUS]
        if not users:
            return None
        nodes.append(users[0].id)
        others = [s for s in graph.flow.operands(users[0]) if s != node]
        if others and others[0] in read:
            own = [n for n in passed if n > others[0]]  # what led to the state is the layer's before
            return told("cross", found, (*nodes, *own), product, base, others[0])
        if not others or others[0] >= 0:
            return None
        node = users[0].id
    return None


def _combined(graph: Graph, found: Features, node: Node) -> FeatureInteraction | None:
    """A cross as one op: `addcmul(x, x0, layer(x))`."""
    added, left, right = graph.flow.operands(node)
    for base, layered in ((left, right), (right, left)):
        read, passed = layers_behind(graph, found, layered)
        if _is_joint(graph, found, base) and added in read:
            return told("cross", found, passed, node.id, base, added)
    return None


def _together(graph: Graph, alone: Iterable[FeatureInteraction]) -> Iterator[FeatureInteraction]:
    """With those products as one that are put side by side or added up."""
    groups: dict[int, FeatureInteraction] = {}
    for interaction in alone:
        place = _goes_to(graph, interaction) if interaction.kind in {"pairs", "product"} else None
        if place is None:
            yield interaction
        elif place in groups:
            groups[place] = _both(groups[place], interaction)
        else:
            groups[place] = interaction
    yield from groups.values()


def _goes_to(graph: Graph, interaction: FeatureInteraction) -> int | None:
    """The op that puts what a product gives beside other such, or the last that adds others to it."""
    place, node = None, interaction.nodes[-1]
    for _ in range(_MOST_PAIRS):
        users = [graph.nodes[u] for u in graph.flow.users(node)]
        join = next((u.id for u in users if u.operation in _JOINS), None)
        if join is not None:
            return join
        node = next((u.id for u in users if u.operation in _PLUS), -1)
        if node < 0:
            return place
        place = node
    return place


def _both(one: FeatureInteraction, other: FeatureInteraction) -> FeatureInteraction:
    nodes = tuple(sorted({*one.nodes, *other.nodes}))
    sources = tuple(dict.fromkeys((*one.features, *other.features)))
    return FeatureInteraction(one.kind, one.at, nodes, sources, max(one.tables, other.tables))
