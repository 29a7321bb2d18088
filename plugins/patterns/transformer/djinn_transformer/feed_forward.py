"""The pattern `mlp`: feed-forward networks, gated or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.hooks import Graph, Node, PatternMatch
from djinn_transformer.networks import PRODUCTS, Network, activations, networks


class FeedForward:
    """Linear layers with an activation between, or with one layer that gates another."""

    name = "mlp"
    tolerates_growth = True
    operations = PRODUCTS

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each network."""
        for network in networks(graph, candidates):
            yield _match(graph, network)


def _match(graph: Graph, network: Network) -> PatternMatch:
    bends = tuple(dict.fromkeys(activations(network)))
    width = graph.meta(graph.flow.value(network.first[0].node.id)).shape[-1]
    first, last = network.first[0].node.id, network.last.node.id
    kind = "gated, " if network.gated else ""
    return PatternMatch(
        pattern=FeedForward.name,
        nodes=network.nodes,
        confidence=0.95,
        reason=f"{kind}from the linear layer in node {first} through {', '.join(bends)} to that in node {last}",
        hints={"fuse": tuple(layer.product.id for layer in network.first)} if len(network.first) > 1 else {},
        details={"gated": network.gated, "layers": len(network.layers), "hidden": width, "activation": bends[0]},
    )
