"""The pattern: candidates in, matches out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from djinn.hooks import Pattern
from djinn.planning import FUSED_ATTENTION, SOFTMAX, Graph, Node, PatternMatch, origin
from djinn_attention.diamonds import ANCHOR, diamonds
from djinn_attention.heads import count
from djinn_attention.linear import linear_attentions
from djinn_attention.masks import Masks, Reach
from djinn_attention.projections import FeedingLayers, feeding, kind, latent
from djinn_attention.scattered import scattered
from djinn_attention.sites import PRODUCTS, Site, find
from djinn_attention.whole import Parts, wholes

_WEIGHING = SOFTMAX | {"acos", "exp"}


class Attention(Pattern):
    """Attention, as one of PyTorch's fused ops or as softmax(q·kᵀ [scaled, masked])·v through any views."""

    name = "attention"
    tolerates_growth = True
    operations = FUSED_ATTENTION | SOFTMAX | PRODUCTS | {ANCHOR, "acos"}

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each attention. Names of modules and parts of names play no role."""
        masks = Masks(graph)
        sites = _sites(graph, candidates)
        for parts in wholes(graph, [(site, feeding(graph, site)) for site in sites]):
            yield _match(graph, parts, masks)


def _sites(graph: Graph, candidates: Sequence[Node]) -> list[Site]:
    """All sites, in order: around each softmax, around each `logsumexp`, and products of products."""
    weighing = [n for n in candidates if n.operation not in PRODUCTS and n.operation != ANCHOR]
    found = [site for node in weighing if (site := find(graph, node) or scattered(graph, node)) is not None]
    if ANCHOR in graph.by_op:
        found += diamonds(graph)
    found += linear_attentions(graph, {i for site in found if not site.fused for i in site.nodes})
    return sorted(found, key=lambda site: site.nodes)


def _match(graph: Graph, parts: Parts, masks: Masks) -> PatternMatch:
    site, feeds = max(parts, key=lambda part: math.prod(part[0].scores))
    return PatternMatch(
        pattern=Attention.name,
        nodes=tuple(sorted({i for part, _ in parts for i in part.nodes})),
        confidence=_confidence(graph, site),
        reason=_reason(graph, parts),
        hints={"colocate": ((site.key, site.value),)},
        details=_facts(graph, site, feeds, masks),
    )


def _facts(graph: Graph, site: Site, feeds: FeedingLayers, masks: Masks) -> dict[str, object]:
    heads = count(graph, site)
    reach = Reach(None, None)  # what windows and blocks leave out, no mask says
    if not site.scattered:
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
        "projections": {role: tuple(nodes) for role, nodes in feeds.nodes().items()},
    }


def _confidence(graph: Graph, site: Site) -> float:
    """A fused op is what it says; batched products of computed values are hardly anything else."""
    if site.fused:
        return 1.0
    if site.scattered:
        return 0.93
    computed = all(graph.producer(origin(graph, v)) is not None for v in (site.query, site.key, site.value))
    return 0.97 if computed and len(site.scores) > 2 else 0.8


def _reason(graph: Graph, parts: Parts) -> str:
    site = parts[0][0]
    if site.fused:
        return f"node {site.nodes[0]} is {graph.nodes[site.nodes[0]].op}"
    first, last = site.nodes[0], site.nodes[-1]
    beside = f"; with {len(parts) - 1} more of the same projections" if len(parts) > 1 else ""
    weighing = next((i for i in site.nodes if graph.nodes[i].operation in _WEIGHING), None)
    if weighing is None:
        return f"node {first} adds up products of keys and values, and node {last} takes them by queries{beside}"
    op = graph.nodes[weighing].op
    return f"the product in node {first} goes through {op} (node {weighing}) into that in node {last}{beside}"
