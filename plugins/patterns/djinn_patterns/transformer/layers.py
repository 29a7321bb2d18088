"""Find the linear layers of a graph."""

from __future__ import annotations

from djinn.planning import Graph, layer_at
from djinn_core.planning.matching.layers import Layer

PRODUCTS = frozenset({"addmm", "linear", "matmul", "mm"})
MIXING = frozenset({"baddbmm", "bmm", "einsum", "matmul"})  # ops that mix values by softmax weights
_BARE = frozenset({"matmul", "mm"})  # products without a bias argument
_SUMS = frozenset({"add", "add_"})


def layers_of(graph: Graph) -> dict[int, Layer]:
    """Return the linear layers of a graph, by the id of the node that computes their result.

    This node is the matrix product, or the addition of the bias.
    """
    layers: dict[int, Layer] = {}
    for index in sorted(i for operation in PRODUCTS for i in graph.by_op.get(operation, ())):
        layer = layer_at(graph, graph.nodes[index])
        if layer is not None:
            biased = _with_bias(graph, layer) if graph.nodes[index].operation in _BARE else None
            layers[index if biased is None else biased.node.id] = biased or layer
    return layers


def _with_bias(graph: Graph, layer: Layer) -> Layer | None:
    """Return the layer extended by the addition of its bias, or None if no bias is added to its product."""
    users = graph.flow.users(layer.product.id)
    if len(users) != 1 or graph.nodes[users[0]].operation not in _SUMS:
        return None
    biased = layer_at(graph, graph.nodes[users[0]])
    return biased if biased is not None and biased.product is layer.product else None
