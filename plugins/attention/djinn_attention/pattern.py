"""The pattern `attention`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from djinn.hooks import Pattern
from djinn.planning import FUSED_ATTENTION, Graph, Node, PatternMatch, origin
from djinn_attention.causal import is_causal
from djinn_attention.feeding import Parts, merge_parts
from djinn_attention.parts import WEIGHING, attentions_in_parts, without_softmax
from djinn_core.planning.matching.attentions import PRODUCTS, Attention, attentions_of


class AttentionPattern(Pattern):
    """Match attention: a fused op of PyTorch, or softmax(q·kᵀ)·v with any views, scales and masks between the ops."""

    name = "attention"
    tolerates_growth = True
    operations = FUSED_ATTENTION | WEIGHING | PRODUCTS

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Yield a match for each attention in the graph, if there are candidates. The names of modules do not matter."""
        if not candidates:
            return
        direct = graph.flow.shared(attentions_of)
        attentions = [*direct, *attentions_in_parts(graph, {i for attention in direct for i in attention.nodes})]
        attentions += without_softmax(
            graph, {i for attention in attentions if not attention.fused for i in attention.nodes}
        )
        direct_ids = {id(attention) for attention in direct}
        for parts in merge_parts(graph, sorted(attentions, key=lambda attention: attention.nodes)):
            largest = max(parts, key=lambda attention: math.prod(attention.scores))
            yield _match(graph, parts, largest, id(largest) in direct_ids)


def _match(graph: Graph, parts: Parts, largest: Attention, is_direct: bool) -> PatternMatch:
    # Attention in windows or blocks leaves out keys without a mask.
    causal = largest.flagged_causal or is_causal(graph, largest.masks, largest.queries) if is_direct else None
    return PatternMatch(
        pattern=AttentionPattern.name,
        nodes=tuple(sorted({i for part in parts for i in part.nodes})),
        confidence=_confidence(graph, largest, is_direct),
        reason=_reason(graph, parts),
        details={"queries": largest.queries, "keys": largest.keys, "causal": causal},
    )


def _confidence(graph: Graph, largest: Attention, is_direct: bool) -> float:
    """Return the confidence of a match. `is_direct`: True if one softmax lies between two products.

    The confidence is 1 for a fused op. It is high for batched products of computed values, which are rarely anything else.
    """
    if largest.fused:
        return 1.0
    if not is_direct:
        return 0.93
    values = (largest.query, largest.key, largest.value)
    from_ops = all(graph.producer(origin(graph, v)) is not None for v in values)
    return 0.97 if from_ops and len(largest.scores) > 2 else 0.8


def _reason(graph: Graph, parts: Parts) -> str:
    nodes = parts[0].nodes
    if parts[0].fused:
        return f"node {nodes[0]} is {graph.nodes[nodes[0]].op}"
    count_note = f"; the match includes {len(parts) - 1} more parts of this attention" if len(parts) > 1 else ""
    weighing = next((i for i in nodes if graph.nodes[i].operation in WEIGHING | {"exp"}), None)
    if weighing is None:
        return f"node {nodes[0]} multiplies keys and values, and node {nodes[-1]} multiplies the result with queries{count_note}"
    op = graph.nodes[weighing].op
    return f"{op} in node {weighing} lies between the matrix products in nodes {nodes[0]} and {nodes[-1]}{count_note}"
