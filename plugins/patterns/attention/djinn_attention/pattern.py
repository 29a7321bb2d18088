"""The pattern: candidates in, matches out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.dataflow import FUSED_ATTENTION, SOFTMAX, origin
from djinn.hooks import Graph, Node, Nodes, PatternMatch
from djinn_attention.heads import count
from djinn_attention.masks import Masks
from djinn_attention.projections import Feeding, feeding, kind, latent
from djinn_attention.sites import Site, find


class Attention:
    """Attention, as one of PyTorch's fused ops or as softmax(q·kᵀ [scaled, masked])·v through any views."""

    name = "attention"
    tolerates_growth = True
    operations = FUSED_ATTENTION | SOFTMAX

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each attention. Names of modules and parts of names play no role."""
        masks = Masks(graph)
        for node in candidates:
            site = find(graph, node)
            if site is not None:
                yield _match(graph, site, node, masks)


def _match(graph: Graph, site: Site, node: Node, masks: Masks) -> PatternMatch:
    feeds = feeding(graph, site)
    return PatternMatch(
        pattern=Attention.name,
        nodes=site.nodes,
        confidence=_confidence(graph, site),
        reason=_reason(site, node),
        hints={"colocate": ((site.key, site.value),), "fuse": _alike(feeds)},
        details=_facts(graph, site, feeds, masks),
    )


def _facts(graph: Graph, site: Site, feeds: Feeding, masks: Masks) -> dict[str, object]:
    heads = count(graph, site)
    reach = masks.reach(site.masks, site.flagged_causal, heads.queries, heads.keys)
    return {
        "fused": site.fused,
        "heads": heads.heads,
        "kv_heads": heads.kv_heads,
        "sharing": heads.sharing(latent(graph, feeds)),
        "head_size": heads.head_size,
        "queries": heads.queries,
        "keys": heads.keys,
        "causal": reach.causal,
        "reach": reach.name,
        "window": reach.window,
        "kind": kind(graph, site, feeds),
        "masked": bool(site.masks) or site.flagged_causal,
        "projections": {role: Nodes(nodes) for role, nodes in feeds.nodes().items()},
    }


def _alike(feeds: Feeding) -> tuple[Nodes, ...]:
    """Layers for queries, keys and values that project the same: one product could do for all of them."""
    firsts = [layers[0] for layers in (feeds.query, feeds.key, feeds.value) if layers]
    nodes = sorted({p.node for p in firsts})
    return (Nodes(nodes),) if len(nodes) > 1 and len({p.data for p in firsts}) == 1 else ()


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
