"""Decomposed norms: data divided by its spread. They do not end a feed-forward network."""

from __future__ import annotations

import attrs

from djinn.planning import CONVOLUTION, Graph, Node, arguments, is_given

_ROOTS = frozenset({"rsqrt", "sqrt"})
_POWERS = frozenset({"pow"})  # exponent -0.5 or 0.5
_LENGTHS = frozenset({"linalg_vector_norm", "norm"})  # root of a sum of squares
_DEVIATIONS = frozenset({"std", "std_mean"})  # root of a variance
_MEASURES = _ROOTS | _POWERS | _LENGTHS | _DEVIATIONS
_SQUARES = frozenset({"mul", "pow", "square"})
_VARIANCES = frozenset({"var", "var_mean"})
_SUMS = frozenset({"add", "add_"})
_BOUNDS = frozenset({*_SUMS, "clamp", "clamp_min", "clamp_min_", "maximum"})
_SCALES = frozenset({"div", "div_", "mul", "mul_"})


@attrs.frozen
class WrittenNorm:
    """A decomposed norm.

    Attributes:
        nodes: the ops, from the square to the last scaling. root: the op that computes the spread.
        data: source of the normalised data.
    """

    nodes: tuple[int, ...]
    root: Node
    data: int


def written_norms(graph: Graph) -> dict[int, WrittenNorm]:
    """Return the decomposed norms of a graph, by the op of the spread. Weight standardization is left out."""
    candidates = sorted(i for operation in _MEASURES & graph.by_op.keys() for i in graph.by_op[operation])
    found = {i: written for i in candidates if (written := _written_out(graph, graph.nodes[i])) is not None}
    return {i: written for i, written in found.items() if not _makes_kernel(graph, written.nodes[-1])}


def _makes_kernel(graph: Graph, index: int) -> bool:
    """Return True if a convolution uses the result as its weight: weight standardization."""
    for user in graph.flow.users(index):
        follower = graph.nodes[user]
        if follower.operation in CONVOLUTION and graph.flow.operands(follower)[0] != index:
            return True
    return False


def _written_out(graph: Graph, root: Node) -> WrittenNorm | None:
    """Match a decomposed norm `x / sqrt(var + eps)` at its `sqrt` node."""
    measured = _measured(graph, root)
    if measured is None:
        return None
    source, measuring = measured
    divisor, after = _bounded(graph, root)
    scaled = _scaled(graph, divisor, source)
    if scaled is None:
        return None
    first, weights = scaled
    if root.operation in _LENGTHS and not weights:
        return None  # unit vectors, as for cosine similarity
    nodes = {*measuring, root.id, *after, first.id, *(n.id for n in weights)}
    return WrittenNorm(tuple(sorted(nodes)), root, source)


def _measured(graph: Graph, root: Node) -> tuple[int, tuple[int, ...]] | None:
    """Return the data whose spread the root measures, and the ops that lead there."""
    flow = graph.flow
    if root.operation in _LENGTHS | _DEVIATIONS:
        return flow.operands(root)[0], ()
    if root.operation in _POWERS and arguments(root).get("exponent") not in {-0.5, 0.5}:
        return None
    before: list[int] = []
    maker = flow.node(flow.operands(root)[0])
    while maker is not None and maker.operation in _BOUNDS and len(maker.inputs) == 1:
        before.append(maker.id)
        maker = flow.node(flow.operands(maker)[0])
    if maker is None:
        return None
    if maker.operation in _VARIANCES:
        return flow.operands(maker)[0], (*before, maker.id)
    square = flow.node(flow.operands(maker)[0]) if maker.operation == "mean" else None
    if square is None or square.operation not in _SQUARES or not _is_square(graph, square):
        return None
    return flow.operands(square)[0], (*before, maker.id, square.id)


def _is_square(graph: Graph, node: Node) -> bool:
    if node.operation == "mul":
        return len(set(graph.flow.operands(node))) == 1 and len(node.inputs) > 1
    return node.operation == "square" or arguments(node).get("exponent") == 2


def _bounded(graph: Graph, root: Node) -> tuple[Node, tuple[int, ...]]:
    """Return the divisor: the root, or its value after `eps` was added or after the reciprocal. Also return its ops."""
    after: list[int] = []
    node = root
    for operations in (_BOUNDS, {"reciprocal"}):
        users = [graph.nodes[u] for u in graph.flow.users(node.id)]
        fitting = [u for u in users if u.operation in operations and len(u.inputs) == 1]
        if len(fitting) == 1:
            node = fitting[0]
            after.append(node.id)
    return node, tuple(after)


def _scaled(graph: Graph, divisor: Node, source: int) -> tuple[Node, list[Node]] | None:
    """Return the op that scales the measured data, with or without its mean subtracted, and the weights around it."""
    flow = graph.flow
    for user in flow.users(divisor.id):
        node = graph.nodes[user]
        others = [s for s in flow.operands(node) if s != divisor.id]
        if node.operation not in _SCALES or len(others) != 1:
            continue
        data = others[0]
        before: list[Node] = []
        if not _is_same(graph, data, source):
            data, before = _unweighted(graph, data)
        if _is_same(graph, data, source):
            return node, [*before, *_weighted(graph, node)]
    return None


def _unweighted(graph: Graph, source: int) -> tuple[int, list[Node]]:
    """Return the source without a multiplication by a weight, and that op. Without one, return `source` itself."""
    node = graph.flow.node(source)
    if node is None or node.operation not in _SCALES:
        return source, []
    operands = graph.flow.operands(node)
    data = [s for s in operands if not _is_weight(graph, s)]
    return (data[0], [node]) if len(operands) == 2 and len(data) == 1 else (source, [])


def _is_same(graph: Graph, one: int, other: int) -> bool:
    """Return True if both sources are the same data, each with or without its mean subtracted."""
    wholes = [(_less(graph, source), source) for source in (one, other)]
    return one == other or any(a == b for a in wholes[0] for b in wholes[1] if a is not None)


def _less(graph: Graph, source: int) -> int | None:
    """Return the minuend if `source` is a difference; otherwise None."""
    node = graph.flow.node(source)
    return graph.flow.operands(node)[0] if node is not None and node.operation == "sub" else None


def _weighted(graph: Graph, node: Node) -> list[Node]:
    """Return the following multiplication by a weight and addition of a bias, if present, after a multiplication by a number."""
    found: list[Node] = []
    for operations in (_SCALES, _SUMS):
        after = _by_weight(graph, node, operations) or _by_weight(graph, _by_number(graph, node), operations)
        if after is not None:
            node = after
            found.append(node)
    return found


def _by_weight(graph: Graph, node: Node | None, operations: frozenset[str]) -> Node | None:
    """Return the op among `operations` that combines the result of `node` with a weight, ignoring the backward pass."""
    if node is None:
        return None
    for user in graph.flow.users(node.id):
        follower = graph.nodes[user]
        if follower.operation in operations:
            others = [s for s in graph.flow.operands(follower) if s != node.id]
            if len(others) == 1 and _is_weight(graph, others[0]):
                return follower
    return None


def _by_number(graph: Graph, node: Node) -> Node | None:
    """Return the op that multiplies the result of `node` by a number."""
    users = (graph.nodes[u] for u in graph.flow.users(node.id))
    return next((u for u in users if u.operation in _SCALES and len(u.inputs) == 1), None)


def _is_weight(graph: Graph, source: int) -> bool:
    """Return True if a source is an input weight, or an input weight plus one."""
    maker = graph.flow.node(source)
    if maker is not None and maker.operation in _SUMS and len(maker.inputs) == 1:
        source = graph.flow.operands(maker)[0]
    return is_given(graph.flow, source)
