"""Layers: products with a weight, in any spelling."""

from __future__ import annotations

import attrs

from djinn_core.ir.flow import Flow
from djinn_core.ir.graph import Graph, Node
from djinn_core.planning.matching.match_result import Match, Ways
from djinn_core.planning.matching.terms import Term

_PRODUCTS = frozenset({"addmm", "linear", "matmul", "mm"})
_BIASED = frozenset({"add", "add_"})
# Ops that fill a new weight: the program itself may build the model.
_FILLED = frozenset({
    "add_", "clamp_", "empty", "empty_strided", "erfinv_", "fill_", "full", "mul_", "normal_", "ones", "rand", "randn",
    "uniform_", "zero_", "zeros",
})  # fmt: skip
_FILLS = 8


def is_weight(flow: Flow, source: int) -> bool:
    """Return True if `source` is a weight: an input, or a value that the program fills with constants."""
    for _ in range(_FILLS):
        source = flow.skip_pass_through(source)
        if source < 0:
            return True
        if flow.graph.nodes[source].operation not in _FILLED:
            return False
        sources = flow.sources[source]
        if not sources:
            return True
        source = sources[0]
    return False


@attrs.frozen
class Layer:
    """A product with a weight.

    Attributes:
        node: the op of the result, possibly the addition of the bias.
        product: the product itself.
        data: source of the data operand.
        weight: source of the weight.
        bias: source of the bias, if there is one.
    """

    node: Node
    product: Node
    data: int
    weight: int
    bias: int | None = None


def layer_at(graph: Graph, node: Node) -> Layer | None:
    """Return the layer that ends in `node`: `linear`, `addmm`, `mm` or `matmul` with a weight, or a bias addition."""
    if node.operation in _PRODUCTS:
        return _product_layer(graph, node)
    if node.operation in _BIASED and len(node.inputs) == 2:
        return _layer_with_bias(graph, node)
    return None


def _product_layer(graph: Graph, node: Node) -> Layer | None:
    flow, sources = graph.flow, graph.flow.sources[node.id]
    if node.operation == "linear":
        return Layer(node, node, sources[0], sources[1], sources[2] if len(sources) > 2 else None)
    bias, (left, right) = (sources[0], sources[1:3]) if node.operation == "addmm" else (None, sources[:2])
    are_weights, ranks = (
        [is_weight(flow, s) for s in (left, right)],
        [len(graph.meta(v).shape) for v in node.inputs[-2:]],
    )
    if are_weights[1] and ranks[1] == 2:
        return Layer(node, node, left, right, bias)
    if are_weights[0] and ranks[0] == 2:
        return Layer(node, node, right, left, bias)
    return None


def _layer_with_bias(graph: Graph, node: Node) -> Layer | None:
    flow = graph.flow
    first, second = flow.operands(node)
    for product, bias in ((first, second), (second, first)):
        maker = flow.node(product)
        if maker is None or maker.operation not in {"matmul", "mm"} or not is_weight(flow, bias):
            continue
        layer = _product_layer(graph, maker)
        if layer is not None and len(graph.meta(flow.value(bias)).shape) == 1:
            return Layer(node, maker, layer.data, layer.weight, bias)
    return None


@attrs.frozen(eq=False)
class LayerTerm(Term):
    """A term for a linear layer. Its operand is the data, not the weight."""

    feeds: tuple[Term, ...] = ()

    @property
    def ends(self) -> frozenset[str]:
        return _PRODUCTS | _BIASED

    def fed_by(self, before: Term) -> LayerTerm:
        return LayerTerm((*self.feeds, before))

    def ways(self, match: Match, source: int) -> Ways:
        source = match.graph.flow.skip_pass_through(source)
        layer = layer_at(match.graph, match.graph.nodes[source]) if source >= 0 else None
        if layer is not None:
            yield from _match_feeds(match.with_nodes(layer.product.id, layer.node.id), layer.data, self.feeds)


def _match_feeds(match: Match, source: int, feeds: tuple[Term, ...]) -> Ways:
    if not feeds:
        yield match
        return
    for way in feeds[0].ways(match, source):
        yield from _match_feeds(way, source, feeds[1:])


def linear() -> LayerTerm:
    """Return a term for a linear layer: `linear`, `addmm`, `mm` or `matmul` with a weight, with or without a bias."""
    return LayerTerm()
