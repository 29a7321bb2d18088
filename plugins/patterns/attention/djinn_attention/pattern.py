"""The pattern: candidates in, matches out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.dataflow import FUSED_ATTENTION, SOFTMAX, origin
from djinn.hooks import Graph, Node, PatternMatch
from djinn_attention import facts
from djinn_attention.sites import Site, find


class Attention:
    """Attention, as one of PyTorch's fused ops or as softmax(q·kᵀ [scaled, masked])·v through any views."""

    name = "attention"
    tolerates_growth = True
    operations = FUSED_ATTENTION | SOFTMAX

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each attention. Names of modules and parts of names play no role."""
        for node in candidates:
            site = find(graph, node)
            if site is not None:
                yield _match(graph, site, node)


def _match(graph: Graph, site: Site, node: Node) -> PatternMatch:
    count = facts.heads(graph, site)
    shape = graph.meta(site.key).shape
    details = {
        "fused": site.fused,
        "heads": count,
        "kv_heads": facts.kv_heads(graph, site, count),
        "queries": facts.queries(graph, site),
        "keys": shape[-2] if site.fused else site.scores[-1],
        "causal": facts.causal(graph, site),
        "kind": facts.kind(graph, site),
        "masked": bool(site.masks) or site.flagged_causal,
    }
    return PatternMatch(
        pattern=Attention.name,
        nodes=site.nodes,
        confidence=_confidence(graph, site),
        reason=_reason(site, node),
        hints={"colocate": ((site.key, site.value),)},
        details=details,
    )


def _confidence(graph: Graph, site: Site) -> float:
    """A fused op is what it says; batched products of computed values are hardly anything else."""
    if site.fused:
        return 1.0
    computed = all(graph.producer(origin(graph, v)) is not None for v in (site.query, site.key, site.value))
    return 0.97 if computed and len(site.scores) > 2 else 0.8


def _reason(site: Site, node: Node) -> str:
    if site.fused:
        return f"node {node.id} is {node.op}"
    return f"the product in node {site.nodes[0]} goes through {node.op} (node {node.id}) into that in node {site.nodes[-1]}"
