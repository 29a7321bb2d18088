"""One attention of several sites: blocks of a sparse matrix, landmarks, windows beside global tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from djinn.planning import Graph
from djinn_attention.projections import FeedingLayers
from djinn_attention.sites import Site

_SEVERAL = 3  # softmaxes of the same layers: two may be two streams, more are parts of one pattern
_WRITES = frozenset({"copy_", "index_copy_", "index_put", "index_put_", "scatter", "slice_scatter"})
_NEAR = 12  # ops between what a site gives and where it is written

Parts = list[tuple[Site, FeedingLayers]]


def wholes(graph: Graph, found: Sequence[tuple[Site, FeedingLayers]]) -> list[Parts]:
    """The sites by attention, in order. Most are one by themselves."""
    if len(found) < 2 or all(site.fused for site, _ in found):
        return [[part] for part in found]
    groups: dict[object, Parts] = defaultdict(list)
    for number, (site, feeds) in enumerate(found):
        layers = (frozenset(p.node for p in feeds.query), frozenset(p.node for p in feeds.key))
        groups[number if site.fused or not all(layers) else layers].append((site, feeds))
    split = [
        part for parts in groups.values() for part in ([parts] if len(parts) >= _SEVERAL else [[p] for p in parts])
    ]
    return _written_over(graph, sorted(split, key=lambda parts: parts[0][0].nodes))


def _written_over(graph: Graph, groups: list[Parts]) -> list[Parts]:
    """Groups whose results are written over those of an earlier one are one with it."""
    joined: list[Parts] = []
    for parts in groups:
        earlier = joined[-1] if joined else []
        ends = {site.nodes[-1] for site, _ in earlier if not site.fused}
        if ends and not parts[0][0].fused and _writes_into(graph, parts[0][0].nodes[-1], ends):
            earlier += parts
        else:
            joined.append(list(parts))
    return joined


def _writes_into(graph: Graph, end: int, ends: set[int]) -> bool:
    """True if what the node `end` gives is written over what one of `ends` gave."""
    flow = graph.flow
    for user in flow.descendants(end, limit=_NEAR):
        node = graph.nodes[user]
        if node.operation in _WRITES and len(flow.operands(node)) > 1:
            into = flow.operands(node)[0]
            return any(source in ends for source in flow.ancestors(into, limit=_NEAR * 2))
    return False
