"""Norms: one of PyTorch's ops, or written out as a division by the root of a mean square."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from djinn.hooks import Graph, Node, PatternMatch, arguments
from djinn.patterns import NORMALISATION, is_given

_ROOTS = frozenset({"rsqrt", "sqrt"})
_SQUARES = frozenset({"mul", "pow", "square"})
_SPREADS = frozenset({"std", "var", "var_mean"})
_SUMS = frozenset({"add", "add_"})
_SCALES = frozenset({"div", "mul"})


@attrs.frozen
class _Written:
    """A norm that is written out.

    Attributes:
        nodes: the ops, from the square to the last scaling. spread: the op that gives the variance or mean square.
        centred: whether the mean was taken away.
    """

    nodes: tuple[int, ...]
    spread: Node
    centred: bool


class Norm:
    """A norm over channels, features or groups."""

    name = "norm"
    tolerates_growth = True
    operations = NORMALISATION | _ROOTS

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each norm."""
        for node in candidates:
            if node.operation in NORMALISATION:
                yield PatternMatch(self.name, (node.id,), 1.0, f"node {node.id} is {node.op}", details={"fused": True})
            elif (written := _written_out(graph, node)) is not None:
                yield _match(written, node)


def _match(written: _Written, root: Node) -> PatternMatch:
    kind = "layer_norm" if written.centred else "rms_norm"
    return PatternMatch(
        pattern=Norm.name,
        nodes=written.nodes,
        confidence=0.97,
        reason=f"what is squared in node {written.nodes[0]} is divided by the root of its mean (node {root.id}), a {kind}",
        hints={"fuse": written.nodes},
        details={"fused": False, "kind": kind},
    )


def _written_out(graph: Graph, root: Node) -> _Written | None:
    """The norm whose root `root` is: of a spread, to which at most a small number was added, and something is scaled by it."""
    flow = graph.flow
    before: list[Node] = []
    maker = flow.node(flow.operands(root)[0])
    while maker is not None and maker.operation in {*_SUMS, "clamp", "clamp_min"} and len(maker.inputs) == 1:
        before.append(maker)
        maker = flow.node(flow.operands(maker)[0])
    if maker is None:
        return None
    squared = _squared(graph, maker)
    if squared is None:
        return None
    source, squares = squared
    scaled = _scaled(graph, root, source)
    if scaled is None:
        return None
    nodes = {maker.id, *squares, *(n.id for n in before), root.id, *(n.id for n in scaled)}
    centred = maker.operation in _SPREADS or _is_centred(graph, source)
    return _Written(tuple(sorted(nodes)), maker, centred)


def _squared(graph: Graph, spread: Node) -> tuple[int, tuple[int, ...]] | None:
    """What the spread is of, and the op that squares it."""
    flow = graph.flow
    if spread.operation in _SPREADS:
        return flow.operands(spread)[0], ()
    if spread.operation != "mean":
        return None
    square = flow.node(flow.operands(spread)[0])
    if square is None or square.operation not in _SQUARES or not _is_square(graph, square):
        return None
    return flow.operands(square)[0], (square.id,)


def _is_square(graph: Graph, node: Node) -> bool:
    if node.operation == "mul":
        return len(set(graph.flow.operands(node))) == 1 and len(node.inputs) > 1
    return node.operation == "square" or arguments(node).get("exponent") == 2


def _scaled(graph: Graph, root: Node, source: int) -> list[Node] | None:
    """The op that scales by the root what was squared, itself or less its mean, and the scaling by weights after it."""
    flow = graph.flow
    for user in flow.users(root.id):
        node = graph.nodes[user]
        others = [s for s in flow.operands(node) if s != root.id]
        if node.operation in _SCALES and len(others) == 1 and _is_same(graph, others[0], source):
            return [node, *_weighted(graph, node)]
    return None


def _is_same(graph: Graph, data: int, source: int) -> bool:
    """Whether `data` is `source`, or `source` less something."""
    node = graph.flow.node(data)
    less = node is not None and node.operation == "sub" and graph.flow.operands(node)[0] == source
    return data == source or less


def _weighted(graph: Graph, node: Node) -> list[Node]:
    """The multiplication by a weight and the addition of a bias that follow, if they do."""
    found: list[Node] = []
    for operations in (_SCALES, _SUMS):
        users = [graph.nodes[u] for u in graph.flow.users(node.id)]
        if len(users) != 1 or users[0].operation not in operations:
            continue
        others = [s for s in graph.flow.operands(users[0]) if s != node.id]
        if len(others) == 1 and _is_weight(graph, others[0]):
            node = users[0]
            found.append(node)
    return found


def _is_weight(graph: Graph, source: int) -> bool:
    """Whether it is given, or one more than what is given."""
    maker = graph.flow.node(source)
    if maker is not None and maker.operation in _SUMS and len(maker.inputs) == 1:
        source = graph.flow.operands(maker)[0]
    return is_given(graph.flow, source)


def _is_centred(graph: Graph, source: int) -> bool:
    maker = graph.flow.node(source)
    return maker is not None and maker.operation == "sub"
