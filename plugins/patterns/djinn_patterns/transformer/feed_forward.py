"""The pattern `mlp`: feed-forward networks, gated or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.hooks import Pattern
from djinn.planning import Graph, Node, PatternMatch
from djinn_patterns.transformer.layers import PRODUCTS
from djinn_patterns.transformer.networks import Network, networks_of


class FeedForward(Pattern):
    """Match linear layers with an activation between them, or with one layer that gates another."""

    name = "mlp"
    tolerates_growth = True
    operations = PRODUCTS

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Return one match for each network whose last product is a candidate."""
        ends = {node.id for node in candidates}
        for network in networks_of(graph):
            if network.last.product.id in ends:
                yield _match(graph, network)


def _match(graph: Graph, network: Network) -> PatternMatch:
    bends = tuple(dict.fromkeys(network.bends))
    widths = tuple(graph.meta(graph.flow.value(layer.node.id)).shape[-1] for layer in (network.first[0], network.last))
    return PatternMatch(
        pattern=FeedForward.name,
        nodes=network.nodes,
        confidence=0.98,
        reason=_reason(network, bends, widths),
        details={"gated": network.gated, "layers": len(network.layers), "hidden": widths[0], "activation": bends[0]},
    )


def _reason(network: Network, bends: tuple[str, ...], widths: tuple[int, ...]) -> str:
    first, last = (layer.node.id for layer in (network.first[0], network.last))
    if len(network.first) > 1:
        start = (
            f"the linear layers in nodes {' and '.join(str(layer.node.id) for layer in network.first)} read the same, "
        )
        gate = "one gates the other" if network.gated else "their results are joined"
        return f"{start}{gate} ({', '.join(bends)}), and the linear layer in node {last} takes the result, {widths[0]} wide"
    halves = ", one half gating the other," if network.gated else ""
    return (
        f"the linear layer in node {first} is {widths[0]} wide, and its result{halves} goes through nothing but element-wise "
        f"ops ({', '.join(bends)}) into that in node {last}, {widths[1]} wide"
    )
