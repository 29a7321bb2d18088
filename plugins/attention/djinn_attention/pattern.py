"""The pattern `attention`: collects candidates and returns matches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from djinn.hooks import Pattern
from djinn.planning import FUSED_ATTENTION, Graph, Node, PatternMatch, arguments, origin, query_shape
from djinn_attention.causal import is_causal
from djinn_attention.feeding import Parts, kind, wholes
from djinn_attention.parts import WEIGHING, in_parts, without_softmax
from djinn_core.planning.matching.attentions import PRODUCTS, Attention, attentions_of

_REPEATS = frozenset({"expand", "index_select", "repeat", "repeat_interleave"})
_STEPS = 24  # views, copies and repeats between a product and the layer of its keys


class AttentionPattern(Pattern):
    """Attention, as one of PyTorch's fused ops or as softmax(q·kᵀ [scaled, masked])·v through any views."""

    name = "attention"
    tolerates_growth = True
    operations = FUSED_ATTENTION | WEIGHING | PRODUCTS

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Return one match for each attention. Names of modules and parts of names play no role."""
        if not candidates:
            return
        plain = graph.flow.shared(attentions_of)
        attentions = [*plain, *in_parts(graph, {i for one in plain for i in one.nodes})]
        attentions += without_softmax(graph, {i for one in attentions if not one.fused for i in one.nodes})
        exact = {id(one) for one in plain}
        for parts in wholes(graph, sorted(attentions, key=lambda one: one.nodes)):
            largest = max(parts, key=lambda one: math.prod(one.scores))
            yield _match(graph, parts, largest, id(largest) in exact)


def _match(graph: Graph, parts: Parts, largest: Attention, exact: bool) -> PatternMatch:
    shape = query_shape(graph, largest.query)
    heads = _heads(shape, largest)
    # No mask shows which keys windows and blocks leave out.
    causal = largest.flagged_causal or is_causal(graph, largest.masks, largest.queries) if exact else None
    return PatternMatch(
        pattern=AttentionPattern.name,
        nodes=tuple(sorted({i for part in parts for i in part.nodes})),
        confidence=_confidence(graph, largest, exact),
        reason=_reason(graph, parts),
        details={
            "fused": largest.fused,
            "heads": heads,
            "kv_heads": _kv_heads(graph, largest, heads),
            "head_size": shape[-1],
            "queries": largest.queries,
            "keys": largest.keys,
            "causal": causal,
            "kind": kind(graph, largest),
            "masked": bool(largest.masks) or largest.flagged_causal,
        },
    )


def _confidence(graph: Graph, largest: Attention, exact: bool) -> float:
    """Return the confidence: full for a fused op, high for batched products of computed values, which are rarely anything else."""
    if largest.fused:
        return 1.0
    if not exact:
        return 0.93
    values = (largest.query, largest.key, largest.value)
    from_ops = all(graph.producer(origin(graph, v)) is not None for v in values)
    return 0.97 if from_ops and len(largest.scores) > 2 else 0.8


def _reason(graph: Graph, parts: Parts) -> str:
    nodes = parts[0].nodes
    if parts[0].fused:
        return f"node {nodes[0]} is {graph.nodes[nodes[0]].op}"
    beside = f"; with {len(parts) - 1} more of the same projections" if len(parts) > 1 else ""
    weighing = next((i for i in nodes if graph.nodes[i].operation in WEIGHING | {"exp"}), None)
    if weighing is None:
        return (
            f"node {nodes[0]} adds up products of keys and values, and node {nodes[-1]} takes them by queries{beside}"
        )
    op = graph.nodes[weighing].op
    return f"the product in node {nodes[0]} goes through {op} (node {weighing}) into that in node {nodes[-1]}{beside}"


def _heads(shape: tuple[int, ...], attention: Attention) -> int | None:
    if len(shape) == 4:
        return shape[1]
    if len(attention.scores) > 3:
        return math.prod(attention.scores[1:-2])
    return 1 if len(shape) == 2 else None


def _kv_heads(graph: Graph, attention: Attention, query_heads: int | None) -> int | None:
    """Return the number of heads of keys and values, before they were repeated for the query heads."""
    if query_heads is None:
        return None
    heads = {_distinct(graph, value, query_heads) for value in (attention.key, attention.value)}
    return min((count for count in heads if query_heads % count == 0), default=query_heads)


def _distinct(graph: Graph, value: int, query_heads: int) -> int:
    shape = graph.meta(value).shape
    ends, heads, repeated = sorted(shape[-2:]), shape[1] if len(shape) == 4 else query_heads, 1
    for _ in range(_STEPS):
        node = graph.producer(value)
        if node is None or not node.inputs:
            break
        if node.operation in _REPEATS:
            repeated *= _times(graph, node)
        elif node.operation != "cat" and not graph.flow.looks[node.id]:
            break
        value = node.inputs[-1 if node.operation == "cat" else 0]
        shape = graph.meta(value).shape
        if node.operation != "cat" and len(shape) == 4 and shape[1] < heads and sorted(shape[-2:]) == ends:
            heads, repeated = shape[1], 1
    return max(1, heads // repeated)


def _times(graph: Graph, node: Node) -> int:
    """Return how often an op repeats the data of one sample."""
    before, after = graph.meta(node.inputs[0]), graph.meta(node.outputs[0])
    by_row = node.operation in {"index_select", "repeat_interleave"} and arguments(node).get("dim") == 0
    if not before.numel or by_row:
        return 1
    batches = after.shape[0] // before.shape[0] if len(after.shape) == len(before.shape) and before.shape[0] else 1
    return max(1, after.numel // before.numel // max(1, batches))
