"""The pattern `block`: attention, and the feed-forward network or mixture of experts that follows it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

import attrs

from djinn.hooks import Pattern
from djinn.planning import (
    FUSED_ATTENTION,
    NORMALISATION,
    SOFTMAX,
    Gradients,
    Graph,
    Node,
    PatternMatch,
    is_given,
)
from djinn_patterns.transformer.layers import MIXING
from djinn_patterns.transformer.mixtures import routers_of
from djinn_patterns.transformer.networks import networks_of

_ATTENTION = FUSED_ATTENTION | SOFTMAX
_DECAYS = frozenset({"cumprod", "log_sigmoid_forward", "logcumsumexp", "softplus"})
_NEAR = 24  # ops between two products of an attention without softmax
_REACH = 96  # sources between a feed-forward network and the attention before it
_SUMS = frozenset({"add", "add_"})


@attrs.frozen
class _Half:
    """The half of a block that is no attention.

    Attributes:
        data: source of what goes in. nodes: its ops. ends: ids of the ops that give results. kind: what it is.
        beside: attentions whose results it takes together with its own.
    """

    data: int
    nodes: tuple[int, ...]
    ends: tuple[int, ...]
    kind: str
    beside: tuple[int, ...] = ()


class TransformerBlock(Pattern):
    """Attention with the feed-forward network after it, or beside it where both read the same."""

    name = "block"
    tolerates_growth = True
    operations = _ATTENTION | MIXING

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each block: each attention belongs to the first network that its result leads to."""
        candidates = [node for node in candidates if node.operation in _ATTENTION]
        softened = {i for router in routers_of(graph) for i in router.softened}
        attentions = {
            node.id for node in candidates if node.operation in FUSED_ATTENTION or _weighs(graph, node)
        } - softened
        blocks = list(_blocks(graph, attentions)) if attentions else []
        return [_match(block) for block in (*blocks, *_without_softmax(graph, attentions, blocks))]


@attrs.define
class _Block:
    """Attentions, and the networks or mixtures of experts that belong to them."""

    halves: list[_Half]
    before: set[int]
    beside: set[int]


def _blocks(graph: Graph, attentions: set[int]) -> Iterable[_Block]:
    """The blocks, in order. Where one attention serves two streams, the networks of both are halves of one block."""
    halves = _halves(graph)
    ends = {end for half in halves for end in half.ends}
    owners: dict[int, _Block] = {}
    ordered, first = sorted(attentions), 0  # whatever comes before `first` has its block
    for half in halves:
        while first < len(ordered) and ordered[first] in owners:
            first += 1
        reached = _reached(graph, half.data, attentions, ends, ordered[0])
        before = reached.difference(owners)
        joined = _joined(graph, half, attentions, ends, ordered[first]) if first < len(ordered) else set()
        free = attentions.intersection(half.beside).union(joined).difference(reached)
        beside = {i for i in free if i not in owners and (i in half.beside or _reads_same(graph, i, half.data))}
        if before or beside:
            owners |= dict.fromkeys(before | beside, _Block([half], before, beside))
        elif reached:
            owners[max(reached)].halves.append(half)
    return {id(block): block for block in owners.values()}.values()


def _without_softmax(graph: Graph, attentions: set[int], blocks: list[_Block]) -> Iterable[_Block]:
    """Blocks whose attention is a product of computed values after another one, for networks that have no attention yet."""
    taken = {half.nodes for block in blocks for half in block.halves}
    everything = _halves(graph)
    halves = [half for half in everything if half.nodes not in taken]
    if not halves or _passes_states(graph):
        return []
    gradients = graph.flow.shared(Gradients)
    products = (i for o in MIXING & graph.by_op.keys() for i in graph.by_op[o])
    mixtures = {i for i in products if i not in gradients and _mixes(graph, i)}
    if not mixtures:
        return []
    ends = {end for half in everything for end in half.ends}
    owners: dict[int, _Block] = {}
    for half in halves:
        reached = _reached(graph, half.data, mixtures | attentions, ends, min(mixtures))
        free = reached - owners.keys() - attentions
        if free and not reached & attentions:
            owners |= dict.fromkeys(free, _Block([half], free, set()))
    return {id(block): block for block in owners.values()}.values()


def _passes_states(graph: Graph) -> bool:
    """True if something decays from place to place: products of states and of what reads them are a recurrence's."""
    if not _DECAYS.isdisjoint(graph.by_op):
        return True
    return any(graph.meta(graph.nodes[i].inputs[0]).dtype.is_floating_point for i in graph.by_op.get("cumsum", ()))


def _mixes(graph: Graph, index: int) -> bool:
    """True if a node multiplies computed values with each other, one of which comes from another such product."""
    flow = graph.flow
    operands = flow.operands(graph.nodes[index])
    if any(is_given(flow, s) for s in operands[-2:]):
        return False
    near = (i for s in operands[-2:] for i in flow.ancestors(s, MIXING, limit=_NEAR) if i >= 0)
    return any(
        graph.nodes[i].operation in MIXING and not any(is_given(flow, s) for s in flow.operands(graph.nodes[i])[-2:])
        for i in near
    )


def _match(block: _Block) -> PatternMatch:
    own = (i for half in block.halves for i in half.nodes)
    nodes = tuple(sorted({*own, *block.before, *block.beside}))
    kinds = {half.kind for half in block.halves}
    return PatternMatch(
        pattern=TransformerBlock.name,
        nodes=nodes,
        confidence=0.97,
        reason=_reason(block),
        details={
            "attentions": len(block.before) + len(block.beside),
            "feed_forward": max(kinds),
            "parallel": bool(block.beside),
        },
    )


def _reason(block: _Block) -> str:
    half = block.halves[0]
    kind = "mixture of experts" if half.kind == "mixture_of_experts" else "feed-forward network"
    where = f"the {kind} that begins in node {half.nodes[0]}"
    before, beside = block.before, block.beside
    others = " and ".join(str(other.nodes[0]) for other in block.halves[1:])
    return "; ".join(
        part
        for part in (
            f"what the attention in {_named(before)} gives goes, past no other network, into {where}" if before else "",
            f"the attention in {_named(beside)} reads what {where} reads, and their results are joined"
            if beside
            else "",
            f"it goes into the network that begins in node {others} as well" if others else "",
        )
        if part
    )


def _named(nodes: set[int]) -> str:
    ids = " and ".join(map(str, sorted(nodes)))
    return f"node {ids}" if len(nodes) == 1 else f"nodes {ids}"


def _halves(graph: Graph) -> list[_Half]:
    """Feed-forward networks and mixtures of experts, in order; networks that read what a router reads belong to its experts."""
    networks = [_Half(n.data, n.nodes, (n.last.node.id,), "mlp", n.beside) for n in networks_of(graph)]
    mixtures: dict[int, _Half] = {}
    for router in routers_of(graph):
        data = graph.flow.beyond(router.layer.data)
        mixtures[data] = _Half(data, router.nodes, (), "mixture_of_experts")
    alone: list[_Half] = []
    for half in networks:
        mixture = mixtures.get(half.data)
        if mixture is None:
            alone.append(half)
        else:
            nodes = tuple(sorted({*mixture.nodes, *half.nodes}))
            mixtures[half.data] = attrs.evolve(mixture, nodes=nodes, ends=(*mixture.ends, *half.ends))
    return sorted((*alone, *mixtures.values()), key=lambda half: half.nodes)


def _weighs(graph: Graph, softmax: Node) -> bool:
    """True if the result of a softmax is an operand of a product: unfused attention."""
    return any(graph.nodes[i].operation in MIXING for i in graph.flow.descendants(softmax.id, MIXING, limit=8))


def _joined(graph: Graph, half: _Half, attentions: set[int], ends: set[int], lowest: int) -> set[int]:
    """Attentions from `lowest` on whose result is added to the network's."""
    found: set[int] = set()
    for end in half.ends:
        for user in graph.flow.users(end):
            node = graph.nodes[user]
            if node.operation in _SUMS:
                others = (s for s in graph.flow.operands(node) if s != end)
                found.update(i for other in others for i in _reached(graph, other, attentions, ends, lowest))
    return found


def _reads_same(graph: Graph, attention: int, data: int) -> bool:
    """True if the attention reads `data`, or the operand of the norm that computes `data`: each branch may have a norm of its own."""
    read = graph.flow.node(data)
    normed = read is not None and read.operation in NORMALISATION
    wanted = {data, graph.flow.operands(read)[0]} if read is not None and normed else {data}
    return any(source in wanted for source in _backwards(graph, attention, min(wanted)))


def _reached(graph: Graph, source: int, attentions: set[int], ends: set[int], lowest: int) -> set[int]:
    """The attentions from `lowest` on that `source` comes from, past no other attention and no op of `ends`."""
    found: set[int] = set()
    walk = _Backwards(graph, source)
    for current in walk:
        if current < lowest:
            break
        if current in ends:
            lowest = max(lowest, current)  # what was there before belongs to blocks before
        elif current in attentions:
            found.add(current)
        elif graph.nodes[current].operation not in _ATTENTION:
            walk.go_on(current)
    return found


def _backwards(graph: Graph, source: int, lowest: int) -> Iterator[int]:
    """Sources that `source` comes from, the latest first, down to `lowest`."""
    walk = _Backwards(graph, source)
    for current in walk:
        yield current
        if current >= 0 and current > lowest:
            walk.go_on(current)


class _Backwards:
    """A walk from a source to those that it comes from, the latest first; `go_on` says past which of them it goes."""

    def __init__(self, graph: Graph, source: int) -> None:
        self._graph = graph
        start = graph.flow.beyond(source)
        self._todo, self._seen = [-start], {start}

    def __iter__(self) -> Iterator[int]:
        while self._todo and len(self._seen) < _REACH:
            yield -heapq.heappop(self._todo)

    def go_on(self, source: int) -> None:
        """Walk on to the operands of the node `source`."""
        for operand in self._graph.flow.operands(self._graph.nodes[source]):
            if operand not in self._seen:
                self._seen.add(operand)
                heapq.heappush(self._todo, -operand)
