"""The pattern `attention`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from djinn.hooks import Pattern
from djinn.planning import FUSED_ATTENTION, Graph, Node, PatternMatch, origin
from djinn_attention.causal import is_causal
from djinn_attention.feeding import Parts, wholes
from djinn_attention.parts import WEIGHING, in_parts, without_softmax
from djinn_core.planning.matching.attentions import PRODUCTS, Attention, attentions_of


class AttentionPattern(Pattern):
    """Match attention: a fused op of PyTorch, or softmax(q·kᵀ)·v with any views, scales and masks between the ops."""

    name = "attention"
    tolerates_growth = True
    operations = FUSED_ATTENTION | WEIGHING | PRODUCTS

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Return one match for each attention. The names of modules do not matter."""
        if not candidates:
            return
        complete = graph.flow.shared(attentions_of)
        attentions = [*complete, *in_parts(graph, {i for one in complete for i in one.nodes})]
        attentions += without_softmax(graph, {i for one in attentions if not one.fused for i in one.nodes})
        exact = {id(one) for one in complete}
        for parts in wholes(graph, sorted(attentions, key=lambda one: one.nodes)):
            largest = max(parts, key=lambda one: math.prod(one.scores))
            yield _match(graph, parts, largest, id(largest) in exact)


def _match(graph: Graph, parts: Parts, largest: Attention, exact: bool) -> PatternMatch:
    # No mask shows which keys windows and blocks leave out.
    causal = largest.flagged_causal or is_causal(graph, largest.masks, largest.queries) if exact else None
    return PatternMatch(
        pattern=AttentionPattern.name,
        nodes=tuple(sorted({i for part in parts for i in part.nodes})),
        confidence=_confidence(graph, largest, exact),
        reason=_reason(graph, parts),
        details={"queries": largest.queries, "keys": largest.keys, "causal": causal},
    )


def _confidence(graph: Graph, largest: Attention, exact: bool) -> float:
    """Return the confidence of a match.

    It is 1 for a fused op. It is high for batched products of computed values, which are rarely anything else.
    """
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
