"""The pattern `block`: attention, and the feed-forward network or mixture of experts that follows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from djinn.dataflow import FUSED_ATTENTION, SOFTMAX
from djinn.hooks import Graph, Node, PatternMatch
from djinn_transformer.mixtures import CHOICES, routers
from djinn_transformer.networks import PRODUCTS, networks

_MIXING = frozenset({"baddbmm", "bmm", "einsum", "matmul"})
_REACH = 96  # sources between a feed-forward network and the attention before it
_SUMS = frozenset({"add", "add_"})


@attrs.frozen
class _Half:
    """The half of a block that is no attention: its data, its ops and where its result is."""

    data: int
    nodes: tuple[int, ...]
    end: int | None
    kind: str


class TransformerBlock:
    """Attention with the feed-forward network after it, or beside it where both read the same."""

    name = "block"
    tolerates_growth = True
    operations = FUSED_ATTENTION | SOFTMAX

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each block: each attention belongs to the first network that its result leads to."""
        free = {node.id for node in candidates if node.operation in FUSED_ATTENTION or _weighs(graph, node)}
        halves = list(_halves(graph))
        ends = frozenset(half.end for half in halves if half.end is not None)
        for half in halves:
            mine = {*_before(graph, half, free, ends), *_beside(graph, half, free, ends)}
            if mine:
                free -= mine
                yield _match(half, mine)


def _match(half: _Half, attentions: set[int]) -> PatternMatch:
    nodes = ", ".join(map(str, sorted(attentions)))
    return PatternMatch(
        pattern=TransformerBlock.name,
        nodes=tuple(sorted({*half.nodes, *attentions})),
        confidence=0.92,
        reason=f"attention in node {nodes}, and the {half.kind} from node {half.nodes[0]} that its result leads to",
        hints={"stage": tuple(sorted({*half.nodes, *attentions}))},
        details={"attentions": len(attentions), "feed_forward": half.kind},
    )


def _halves(graph: Graph) -> Iterator[_Half]:
    """Feed-forward networks and mixtures of experts, in order."""
    found = [_Half(n.data, n.nodes, n.last.node.id, "mlp") for n in networks(graph, _nodes(graph, PRODUCTS))]
    for router in routers(graph, _nodes(graph, CHOICES)):
        ids = (router.layer.node.id, *router.between, router.choice.id)
        found.append(_Half(graph.flow.beyond(router.layer.data), tuple(sorted(ids)), None, "mixture_of_experts"))
    mixed = {half.data for half in found if half.end is None}
    kept = (half for half in found if half.end is None or half.data not in mixed)
    return iter(sorted(kept, key=lambda half: half.nodes))


def _nodes(graph: Graph, operations: frozenset[str]) -> list[Node]:
    return [graph.nodes[i] for i in sorted(i for o in operations for i in graph.by_op.get(o, ()))]


def _weighs(graph: Graph, softmax: Node) -> bool:
    """Whether the weights of a softmax go into a product: attention that is written out."""
    return any(graph.nodes[i].operation in _MIXING for i in graph.flow.descendants(softmax.id, _MIXING, limit=8))


def _before(graph: Graph, half: _Half, free: set[int], ends: frozenset[int]) -> set[int]:
    """Attentions whose result leads to the network's data, past no other network."""
    return _reached(graph, half.data, free, ends - {half.end})


def _beside(graph: Graph, half: _Half, free: set[int], ends: frozenset[int]) -> set[int]:
    """Attentions whose result is added to the network's."""
    if half.end is None:
        return set()
    found: set[int] = set()
    for user in graph.flow.users(half.end):
        node = graph.nodes[user]
        if node.operation in _SUMS:
            others = [s for s in graph.flow.operands(node) if s != half.end]
            found |= {i for other in others for i in _reached(graph, other, free, ends)}
    return found


def _reached(graph: Graph, source: int, free: set[int], ends: frozenset[int]) -> set[int]:
    found: set[int] = set()
    todo, seen = [graph.flow.beyond(source)], {graph.flow.beyond(source)}
    while todo and len(seen) < _REACH:
        current = todo.pop(0)
        if current in free:
            found.add(current)
        if current < 0 or current in free or current in ends:
            continue
        node = graph.nodes[current]
        if node.operation in FUSED_ATTENTION or node.operation in SOFTMAX:
            continue
        fresh = [s for s in dict.fromkeys(graph.flow.operands(node)) if s not in seen]
        seen.update(fresh)
        todo += fresh
    return found
