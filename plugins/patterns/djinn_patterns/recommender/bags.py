"""Recognise embedding bags: look-ups of table rows that are reduced to one row per sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.hooks import Pattern
from djinn.planning import Graph, Node, PatternMatch, arguments, is_weight

BAGS = frozenset({"_embedding_bag", "_embedding_bag_forward_only", "embedding_bag"})
_REDUCTIONS = frozenset({"amax", "max", "mean", "sum"})
_WEIGHTING = frozenset({"div", "masked_fill", "mul", "where"})
_BETWEEN = 3  # maximum number of ops between look-up and reduction: sample weights, masks


class EmbeddingBag(Pattern):
    """Match embedding bags: PyTorch's op, or a look-up whose only use is a reduction over the ids of a sample."""

    name = "embedding_bag"
    tolerates_growth = True
    operations = BAGS | {"embedding"}

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Yield a match for each embedding bag."""
        for node in candidates:
            if node.operation in BAGS:
                yield _match(graph, (node,), 1.0)
            elif (nodes := _bag_ops(graph, node)) is not None:
                yield _match(graph, nodes, 0.95)


def _match(graph: Graph, nodes: Sequence[Node], confidence: float) -> PatternMatch:
    look_up, last = nodes[0], nodes[-1]
    weight = look_up.inputs[0]
    width = graph.meta(weight).shape[-1]
    reduction_note = "" if last is look_up else f", and node {last.id} ({last.op}) reduces them"
    return PatternMatch(
        pattern=EmbeddingBag.name,
        nodes=tuple(n.id for n in nodes),
        confidence=confidence,
        reason=f"node {look_up.id} ({look_up.op}) looks up rows of {width} numbers for the ids of each sample{reduction_note}",
        # Partial sums of rows can be added, so a sharded table sends one row per sample and shard.
        hints={"tables": (weight,)},
    )


def _bag_ops(graph: Graph, look_up: Node) -> tuple[Node, ...] | None:
    """Return the ops of an embedding bag: the look-up, ops that weight its rows, and the reduction over ids of a sample.

    Return None if `look_up` is not the start of an embedding bag.
    """
    ids, weight = graph.meta(look_up.inputs[1]).shape, look_up.inputs[0]
    if (
        len(ids) < 2
        or len(graph.meta(weight).shape) != 2
        or not is_weight(graph.flow, graph.flow.operand(look_up, weight))
    ):
        return None
    nodes = [look_up]
    for _ in range(_BETWEEN):
        users = [n for u in graph.flow.users(nodes[-1].id) if "_backward" not in (n := graph.nodes[u]).operation]
        if len(users) != 1:
            return None
        nodes.append(users[0])
        if users[0].operation in _REDUCTIONS:
            return tuple(nodes) if _reduces_ids(graph, users[0], len(ids)) else None
        if users[0].operation not in _WEIGHTING:
            return None
    return None


def _reduces_ids(graph: Graph, reduction: Node, rank: int) -> bool:
    """Return True if a reduction is only over the last dimension of the ids. `rank`: number of dimensions of the ids."""
    shape = graph.meta(reduction.inputs[0]).shape
    reduced_dims = arguments(reduction).get("dim")
    dims = reduced_dims if isinstance(reduced_dims, list | tuple) else (reduced_dims,)
    return len(shape) == rank + 1 and [d % len(shape) for d in dims if isinstance(d, int)] == [rank - 1]
