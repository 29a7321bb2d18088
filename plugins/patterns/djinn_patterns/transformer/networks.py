"""Find feed-forward networks: linear layers with only elementwise ops between them, including an activation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import attrs

from djinn.planning import ACTIVATION, CONVOLUTION, FUSED_ATTENTION, NORMALISATION, SOFTMAX, Graph, Node, is_given
from djinn_core.planning.matching.layers import Layer
from djinn_patterns.transformer.layers import MIXING, layers_of
from djinn_patterns.transformer.positions import scores_places

_BENDS = frozenset({
    *ACTIVATION, "_prelu_kernel", "celu", "clamp", "elu_", "erf", "exp", "expm1", "gelu", "glu", "hardsigmoid", "hardswish_",
    "leaky_relu_", "log_sigmoid_forward", "maximum", "pow", "prelu", "selu", "sigmoid_", "sin", "square", "tanh_", "where",
})  # fmt: skip
_JOINS = frozenset({"cat", "concat"})
_SPREADS = frozenset({"mean", "std", "var"})  # of a norm that is written out
_BETWEEN = frozenset({
    *_BENDS, *NORMALISATION, *CONVOLUTION, *_JOINS, *_SPREADS, "abs", "add", "add_", "addcmul", "alpha_dropout", "div", "div_", "dropout",
    "ge", "gt", "le", "log1p", "lt", "minimum", "mul", "mul_", "native_dropout", "neg", "reciprocal", "rsqrt", "rsub", "sqrt", "sub",
})  # fmt: skip
_LIMIT = 24  # maximum length of a chain of ops between two layers; a decomposed activation has about ten
_MOST = 8  # maximum number of layers that one result depends on


@attrs.frozen
class Network:
    """A feed-forward network.

    Attributes:
        data: source of the input.
        first: the first layers. They are two if one layer gates the other.
        layers: all layers, in order.
        between: the ops between the layers.
    """

    data: int
    first: tuple[Layer, ...]
    layers: tuple[Layer, ...]
    between: tuple[Node, ...]

    @property
    def last(self) -> Layer:
        """Return the last layer."""
        return self.layers[-1]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Ids of the network's ops, in order."""
        products = {n.id for layer in self.layers for n in (layer.product, layer.node)}
        return tuple(sorted(products | {n.id for n in self.between}))


def networks_of(graph: Graph) -> tuple[Network, ...]:
    """Return the feed-forward networks of a graph, in order. If a network feeds another network, the two are merged."""
    return tuple(_Search(graph).networks())


class _Way(NamedTuple):
    """Path from linear layers to a result, through elementwise ops only.

    Attributes:
        layers: the linear layers.
        length: number of ops.
        bends: True if an op is an activation.
    """

    layers: frozenset[int]
    length: int = 0
    bends: bool = False


class _Search:
    """Walk over a graph once, in order, and record the path from linear layers to each result."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._layers = layers_of(graph)
        self._ways: dict[int, _Way] = {}

    def networks(self) -> list[Network]:
        """Return all networks of the graph."""
        all_layers, ways, by_op = self._layers, self._ways, self._graph.by_op
        networks: list[Network] = []
        if len(all_layers) < 2:
            return networks
        between = {i for operation in _BETWEEN for i in by_op.get(operation, ())}
        for index in sorted(between.union(all_layers)):
            layer = all_layers.get(index)
            if layer is None:
                way = self._through(self._graph.nodes[index])
                if way is not None:
                    ways[index] = way
                continue
            network = self._ending_in(layer)
            if network is not None:
                networks.append(network)
            ways[index] = _Way(frozenset((index,)))
        return [n for n in _joined(networks) if not scores_places(self._graph, n.data, n.last.node.id)]

    def _through(self, node: Node) -> _Way | None:
        """Return the path, extended by one op. If the op has other inputs than layers and weights, return None."""
        operation = node.operation
        if operation in CONVOLUTION and not self._is_by_channel(node):
            return None
        if operation in _SPREADS and not self._is_of_last_dimension(node):
            return None
        flow, ways = self._graph.flow, self._ways
        before: list[_Way] = []
        attends = False
        for source in flow.operands(node):
            way = ways.get(source)
            if way is not None:
                before.append(way)
            elif operation in _JOINS and self._is_attention(source):
                attends = True
            elif source >= 0 and not is_given(flow, source):
                return None
        if not before or (operation in _JOINS and not attends):
            return None
        return self._longer(node, before)

    def _longer(self, node: Node, before: list[_Way]) -> _Way | None:
        way = before[0]
        if len(before) == 1 or all(path.layers == way.layers for path in before):
            layers = way.layers
        else:
            layers = frozenset().union(*(path.layers for path in before))
        length = 1 + max(path.length for path in before)
        if length > _LIMIT or len(layers) > _MOST:
            return None
        bends = self._bends(node) or any(path.bends for path in before)
        return _Way(layers, length, bends)

    def _bends(self, node: Node) -> bool:
        """Return True if a node is an activation or a part of one, unless it is the square in a norm."""
        users = [self._graph.nodes[user].operation for user in self._graph.flow.users(node.id)]
        return node.operation in _BENDS and not (users and _SPREADS.issuperset(users))

    def _is_by_channel(self, node: Node) -> bool:
        """Return True if a node is a depthwise convolution of images."""
        weight = self._graph.meta(node.inputs[1]).shape
        return len(weight) == 4 and weight[1] == 1 < weight[0]

    def _is_of_last_dimension(self, node: Node) -> bool:
        """Return True if a node reduces the last dimension of its operand to one element."""
        input_shape, output_shape = (self._graph.meta(values[0]).shape for values in (node.inputs, node.outputs))
        return len(output_shape) == len(input_shape) and output_shape == (*input_shape[:-1], 1)

    def _is_attention(self, source: int) -> bool:
        return source >= 0 and gives_attention(self._graph, self._graph.nodes[source])

    def _ending_in(self, last: Layer) -> Network | None:
        way = self._ways.get(self._graph.flow.beyond(last.data))
        if way is None or not way.bends:
            return None
        first = tuple(self._layers[i] for i in sorted(way.layers))
        data = {self._graph.flow.beyond(layer.data) for layer in first}
        if len(data) != 1:
            return None
        return Network(data.pop(), first, (*first, last), tuple(self._between(last, way.layers)))

    def _between(self, last: Layer, first: frozenset[int]) -> Iterator[Node]:
        """Yield the ops between the first layers and the last layer."""
        flow, ways = self._graph.flow, self._ways
        todo, visited = [flow.beyond(last.data)], set(first)
        while todo:
            source = todo.pop()
            if source not in visited and source in ways:
                visited.add(source)
                yield self._graph.nodes[source]
                todo += flow.operands(self._graph.nodes[source])


def gives_attention(graph: Graph, node: Node) -> bool:
    """Return True if `node` computes the result of an attention: a fused op, or a product with softmax weights."""
    if node.operation in MIXING:
        weights = graph.flow.node(graph.flow.operands(node)[0])
        return weights is not None and weights.operation in SOFTMAX
    return node.operation in FUSED_ATTENTION


def _joined(found: list[Network]) -> list[Network]:
    """Merge each network with the network that it feeds. Drop a network that feeds several others."""
    going_on = Counter(n.first[0].node.id for n in found if len(n.first) == 1)
    joined: dict[int, Network] = {}  # by the id of the last op
    for network in found:
        start = network.first[0].node.id
        if len(network.first) > 1 or start not in joined:
            joined[network.last.node.id] = network
        elif going_on[start] == 1:
            joined[network.last.node.id] = _one(joined.pop(start), network)
    return list(joined.values())


def _one(before: Network, after: Network) -> Network:
    layers, between = (*before.layers, *after.layers[1:]), (*before.between, *after.between)
    return Network(before.data, before.first, layers, between)
