"""The linear layers of a graph, found once for all patterns of this package."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import attrs

from djinn.planning import Graph, layer_at
from djinn_core.ir.flow import Flow
from djinn_core.planning.matching.layers import Layer

PRODUCTS = frozenset({"addmm", "linear", "matmul", "mm"})
MIXING = frozenset({"baddbmm", "bmm", "einsum", "matmul"})  # what takes values together by the weights of a softmax
_BARE = frozenset({"matmul", "mm"})  # products that take no bias
_SUMS = frozenset({"add", "add_"})


@attrs.frozen
class Layers:
    """Linear layers of a graph.

    Attributes:
        products: by the id of the product; without a bias that is added afterwards.
        whole: by the id of the op that gives the result, which may be the addition of a bias.
        backward: id of the first op of a backward pass; that of no op where there is none.
    """

    products: dict[int, Layer]
    whole: dict[int, Layer]
    backward: int


def layers_of(graph: Graph) -> Layers:
    """The layers of a graph."""
    found = _known.get(graph.flow)
    if found is None:
        found = _known[graph.flow] = _found_in(graph)
    return found


# By the data flow, which a graph has one of; nothing here keeps a graph alive.
_known: WeakKeyDictionary[Flow, Layers] = WeakKeyDictionary()


def _found_in(graph: Graph) -> Layers:
    nodes, by_op = graph.nodes, graph.by_op
    products: dict[int, Layer] = {}
    whole: dict[int, Layer] = {}
    for index in sorted(i for operation in PRODUCTS for i in by_op.get(operation, ())):
        layer = layer_at(graph, nodes[index])
        if layer is None:
            continue
        products[index] = layer
        biased = _with_bias(graph, layer) if nodes[index].operation in _BARE else None
        whole[index if biased is None else biased.node.id] = biased or layer
    backward = (i for o, ids in by_op.items() if "_backward" in o or o == "ones_like" for i in ids[:1])
    return Layers(products, whole, min(backward, default=len(nodes)))


def _with_bias(graph: Graph, layer: Layer) -> Layer | None:
    """The layer with the bias that is added to its product, if one is."""
    users = graph.flow.users(layer.product.id)
    if len(users) != 1 or graph.nodes[users[0]].operation not in _SUMS:
        return None
    biased = layer_at(graph, graph.nodes[users[0]])
    return biased if biased is not None and biased.product is layer.product else None
