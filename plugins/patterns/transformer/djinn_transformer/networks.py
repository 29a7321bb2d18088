"""Where feed-forward networks are: linear layers with nothing but element-wise ops between, one of them an activation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from djinn.hooks import Graph, Node
from djinn.patterns import ACTIVATION, NORMALISATION, Layer, is_given, layer_at

PRODUCTS = frozenset({"add", "addmm", "linear", "matmul", "mm"})  # `add`: of a bias, after a product
_BENDS = frozenset({*ACTIVATION, "clamp", "erf", "exp", "gelu", "pow", "selu", "square", "tanh_"})
_BETWEEN = frozenset({
    *_BENDS, *NORMALISATION, "abs", "add", "add_", "alpha_dropout", "div", "div_", "dropout", "log1p", "minimum", "mul",
    "mul_", "native_dropout", "neg", "reciprocal", "sub",
})  # fmt: skip
_PARTS = frozenset({
    "chunk", "narrow", "select", "slice", "split", "split_with_sizes", "unbind", "unsafe_chunk", "unsafe_split",
})  # fmt: skip
_LIMIT = 24  # ops between two layers: a written-out activation takes some ten


@attrs.frozen
class Network:
    """A feed-forward network.

    Attributes:
        data: source of what goes in. first: the layers that it goes into, two where one gates the other.
        layers: all of them, in order. between: the ops between them.
        gated: whether what two layers (or two halves of one) give is multiplied.
    """

    data: int
    first: tuple[Layer, ...]
    layers: tuple[Layer, ...]
    between: tuple[Node, ...]
    gated: bool

    @property
    def last(self) -> Layer:
        """The layer that gives the result."""
        return self.layers[-1]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Ids of its ops, in order."""
        products = {n.id for layer in self.layers for n in (layer.product, layer.node)}
        return tuple(sorted(products | {n.id for n in self.between}))


def networks(graph: Graph, candidates: Sequence[Node]) -> tuple[Network, ...]:
    """All feed-forward networks that end in one of `candidates`; one that goes on where another ends is one with it."""
    found: dict[int, Network] = {}  # by the id of its last op
    for node in candidates:
        layer = layer_at(graph, node)
        if layer is None or _is_biased(graph, layer):
            continue
        network = _ending_in(graph, layer)
        if network is not None:
            found[node.id] = _joined(network, found)
    return tuple(found.values())


def _is_biased(graph: Graph, layer: Layer) -> bool:
    """Whether a bias is still to be added: the layer ends there."""
    if layer.bias is not None or layer.product.operation not in {"matmul", "mm"}:
        return False
    users = [graph.nodes[u] for u in graph.flow.users(layer.node.id)]
    ended = layer_at(graph, users[0]) if len(users) == 1 else None
    return ended is not None and ended.product is layer.product


def _joined(network: Network, found: dict[int, Network]) -> Network:
    """With the network before it, where the only layer that it begins with is the last of that one."""
    if len(network.first) > 1:
        return network
    before = found.pop(network.first[0].node.id, None)
    if before is None:
        return network
    return Network(
        before.data,
        before.first,
        (*before.layers, *network.layers[1:]),
        (*before.between, *network.between),
        before.gated or network.gated,
    )


def _ending_in(graph: Graph, last: Layer) -> Network | None:
    walked = _Walk(graph)
    if not walked.go_back(last.data) or not walked.bends:
        return None
    first = sorted(walked.layers.values(), key=lambda layer: layer.node.id)
    data = {graph.flow.beyond(layer.data) for layer in first}
    if len(data) != 1:
        return None
    gated = walked.multiplies and (len(first) > 1 or _is_halved(graph, first[0]))
    return Network(data.pop(), tuple(first), (*first, last), tuple(walked.between.values()), gated)


def _is_halved(graph: Graph, layer: Layer) -> bool:
    """Whether parts of the layer's result go different ways."""
    return any(graph.nodes[i].operation in _PARTS for i in graph.flow.readers(layer.node.id))


class _Walk:
    """Goes back from what a layer reads to the layers that it comes from, through element-wise ops only."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.layers: dict[int, Layer] = {}
        self.between: dict[int, Node] = {}
        self.bends = False
        self.multiplies = False

    def go_back(self, source: int) -> bool:
        """Whether every way back ends in a layer, or in something given."""
        flow = self._graph.flow
        todo = [flow.beyond(source)]
        while todo:
            source = todo.pop()
            if source in self.layers or source in self.between or is_given(flow, source):
                continue
            node = self._graph.nodes[source]
            layer = layer_at(self._graph, node)
            if layer is not None:
                self.layers[source] = layer
                continue
            if node.operation not in _BETWEEN or len(self.between) >= _LIMIT:
                return False
            self._pass(node)
            todo += flow.operands(node)
        return bool(self.layers)

    def _pass(self, node: Node) -> None:
        self.between[node.id] = node
        self.bends = self.bends or node.operation in _BENDS
        if node.operation in {"mul", "mul_"} and len(node.inputs) > 1:
            self.multiplies = True


def activations(network: Network) -> Iterator[str]:
    """Names of the ops that bend, in order."""
    return (n.operation for n in sorted(network.between, key=lambda n: n.id) if n.operation in _BENDS)
