"""Find feed-forward networks: linear layers with only elementwise ops between them, including an activation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import attrs

from djinn.planning import ACTIVATION, CONVOLUTION, FUSED_ATTENTION, NORMALISATION, SOFTMAX, Graph, Node, is_weight
from djinn_core.planning.matching.layers import Layer
from djinn_patterns.transformer.layers import MIXING, layers_of
from djinn_patterns.transformer.positions import is_score_bias

_NONLINEAR = frozenset({
    *ACTIVATION, "_prelu_kernel", "celu", "clamp", "elu_", "erf", "exp", "expm1", "gelu", "glu", "hardsigmoid", "hardswish_",
    "leaky_relu_", "log_sigmoid_forward", "maximum", "pow", "prelu", "selu", "sigmoid_", "sin", "square", "tanh_", "where",
})  # fmt: skip
_JOINS = frozenset({"cat", "concat"})
_STATISTICS = frozenset({"mean", "std", "var"})  # of a norm that is written out
_OPS_BETWEEN_LAYERS = frozenset({
    *_NONLINEAR, *NORMALISATION, *CONVOLUTION, *_JOINS, *_STATISTICS, "abs", "add", "add_", "addcmul", "alpha_dropout", "div", "div_", "dropout",
    "ge", "gt", "le", "log1p", "lt", "minimum", "mul", "mul_", "native_dropout", "neg", "reciprocal", "rsqrt", "rsub", "sqrt", "sub",
})  # fmt: skip
_MAX_LENGTH = 24  # maximum number of ops in a chain between two layers; a decomposed activation has about ten
_MAX_LAYERS = 8  # maximum number of layers on which a result depends


@attrs.frozen
class Network:
    """A feed-forward network.

    Attributes:
        data: source of the network's input.
        first: the layers that read the input: one, or two if one layer gates the other.
        layers: all layers, in order.
        between: the ops between the layers.
    """

    data: int
    first: tuple[Layer, ...]
    layers: tuple[Layer, ...]
    between: tuple[Node, ...]

    @property
    def last(self) -> Layer:
        """The last layer."""
        return self.layers[-1]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Ids of the network's ops, in order."""
        products = {n.id for layer in self.layers for n in (layer.product, layer.node)}
        return tuple(sorted(products | {n.id for n in self.between}))


def networks_of(graph: Graph) -> tuple[Network, ...]:
    """Return the feed-forward networks of a graph, in order. A network and the only network that it feeds are merged."""
    return tuple(_Search(graph).networks())


class _Path(NamedTuple):
    """Paths from linear layers to a result, only through ops that may lie between layers of a network.

    Attributes:
        layers: ids of the linear layers.
        length: number of ops on the longest path.
        is_nonlinear: True if an op on a path is an activation.
    """

    layers: frozenset[int]
    length: int = 0
    is_nonlinear: bool = False


class _Search:
    """Search for networks in one pass over a graph, in order. `_paths`: paths to a result, by node."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._layers = layers_of(graph)
        self._paths: dict[int, _Path] = {}

    def networks(self) -> list[Network]:
        """Return all networks of the graph, except networks that compute a bias of attention scores."""
        all_layers, paths, by_op = self._layers, self._paths, self._graph.by_op
        networks: list[Network] = []
        if len(all_layers) < 2:
            return networks
        between = {i for operation in _OPS_BETWEEN_LAYERS for i in by_op.get(operation, ())}
        for index in sorted(between.union(all_layers)):
            layer = all_layers.get(index)
            if layer is None:
                path = self._extend_path(self._graph.nodes[index])
                if path is not None:
                    paths[index] = path
                continue
            network = self._network_ending_in(layer)
            if network is not None:
                networks.append(network)
            paths[index] = _Path(frozenset((index,)))
        return [n for n in _merge_chained(networks) if not is_score_bias(self._graph, n.data, n.last.node.id)]

    def _extend_path(self, node: Node) -> _Path | None:
        """Return the paths to the result of `node`.

        Return None if no path can continue, or an operand has no path and is neither constant nor a joined attention.
        """
        operation = node.operation
        if operation in CONVOLUTION and not self._is_depthwise(node):
            return None
        if operation in _STATISTICS and not self._reduces_last_dimension(node):
            return None
        flow, paths = self._graph.flow, self._paths
        before: list[_Path] = []
        attends = False
        for source in flow.operands(node):
            path = paths.get(source)
            if path is not None:
                before.append(path)
            elif operation in _JOINS and self._is_attention(source):
                attends = True
            elif source >= 0 and not is_weight(flow, source):
                return None
        if not before or (operation in _JOINS and not attends):
            return None
        return self._join_paths(node, before)

    def _join_paths(self, node: Node, before: list[_Path]) -> _Path | None:
        first = before[0]
        if len(before) == 1 or all(path.layers == first.layers for path in before):
            layers = first.layers
        else:
            layers = frozenset().union(*(path.layers for path in before))
        length = 1 + max(path.length for path in before)
        if length > _MAX_LENGTH or len(layers) > _MAX_LAYERS:
            return None
        is_nonlinear = self._is_nonlinear(node) or any(path.is_nonlinear for path in before)
        return _Path(layers, length, is_nonlinear)

    def _is_nonlinear(self, node: Node) -> bool:
        """Return True if a node is an activation or a part of one. The square in a norm does not count."""
        users = [self._graph.nodes[user].operation for user in self._graph.flow.users(node.id)]
        return node.operation in _NONLINEAR and not (users and _STATISTICS.issuperset(users))

    def _is_depthwise(self, node: Node) -> bool:
        """Return True if a node is a depthwise convolution of images."""
        weight = self._graph.meta(node.inputs[1]).shape
        return len(weight) == 4 and weight[1] == 1 < weight[0]

    def _reduces_last_dimension(self, node: Node) -> bool:
        """Return True if a node reduces the last dimension of its operand to one element."""
        input_shape, output_shape = (self._graph.meta(values[0]).shape for values in (node.inputs, node.outputs))
        return len(output_shape) == len(input_shape) and output_shape == (*input_shape[:-1], 1)

    def _is_attention(self, source: int) -> bool:
        return source >= 0 and computes_attention(self._graph, self._graph.nodes[source])

    def _network_ending_in(self, last: Layer) -> Network | None:
        path = self._paths.get(self._graph.flow.skip_pass_through(last.data))
        if path is None or not path.is_nonlinear:
            return None
        first = tuple(self._layers[i] for i in sorted(path.layers))
        data = {self._graph.flow.skip_pass_through(layer.data) for layer in first}
        if len(data) != 1:
            return None
        return Network(data.pop(), first, (*first, last), tuple(self._between(last, path.layers)))

    def _between(self, last: Layer, first: frozenset[int]) -> Iterator[Node]:
        """Yield the ops between the first layers and the last layer."""
        flow, paths = self._graph.flow, self._paths
        todo, visited = [flow.skip_pass_through(last.data)], set(first)
        while todo:
            source = todo.pop()
            if source not in visited and source in paths:
                visited.add(source)
                yield self._graph.nodes[source]
                todo += flow.operands(self._graph.nodes[source])


def computes_attention(graph: Graph, node: Node) -> bool:
    """Return True if `node` computes the result of an attention: a fused op, or a product with softmax weights."""
    if node.operation in MIXING:
        weights = graph.flow.node(graph.flow.operands(node)[0])
        return weights is not None and weights.operation in SOFTMAX
    return node.operation in FUSED_ATTENTION


def _merge_chained(networks: list[Network]) -> list[Network]:
    """Merge a network with the network that begins with its last layer. If several begin with it, leave these out."""
    going_on = Counter(n.first[0].node.id for n in networks if len(n.first) == 1)
    joined: dict[int, Network] = {}  # by the id of the last op
    for network in networks:
        start = network.first[0].node.id
        if len(network.first) > 1 or start not in joined:
            joined[network.last.node.id] = network
        elif going_on[start] == 1:
            joined[network.last.node.id] = _merge_two(joined.pop(start), network)
    return list(joined.values())


def _merge_two(before: Network, after: Network) -> Network:
    layers, between = (*before.layers, *after.layers[1:]), (*before.between, *after.between)
    return Network(before.data, before.first, layers, between)
