"""The pattern `mlp`: feed-forward networks, gated or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.hooks import Pattern
from djinn.planning import Graph, Node, PatternMatch
from djinn_patterns.transformer.layers import PRODUCTS
from djinn_patterns.transformer.networks import Network, networks_of


class FeedForward(Pattern):
    """Match feed-forward networks: linear layers with an activation between them, gated or not."""

    name = "mlp"
    tolerates_growth = True
    operations = PRODUCTS

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Yield a match for each network whose last matrix product is a candidate."""
        ends = {node.id for node in candidates}
        for network in networks_of(graph):
            if network.last.product.id in ends:
                yield _match(graph, network)


def _match(graph: Graph, network: Network) -> PatternMatch:
    first = " and ".join(str(layer.node.id) for layer in network.first)
    width = graph.meta(graph.flow.value(network.first[0].node.id)).shape[-1]
    return PatternMatch(
        pattern=FeedForward.name,
        nodes=network.nodes,
        confidence=0.98,
        reason=f"linear layers in nodes {first}, {width} wide, go through nothing but element-wise ops into that in node "
        f"{network.last.node.id}",
        details={"layers": len(network.layers)},
    )
