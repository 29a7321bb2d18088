"""Recognise attention whose scores have several parts or are sums of layers, and attention without softmax."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from djinn.planning import COPIES, SOFTMAX, Gradients, Graph, is_given, linear, op, through
from djinn_core.planning.matching.attentions import PRODUCTS, Attention
from djinn_core.planning.matching.match_result import Found, Place
from djinn_core.planning.matching.terms import Term

# Ops that concatenate scores, or split weights, without computing.
_MOVES = frozenset({
    *COPIES, "cat", "constant_pad_nd", "copy", "fill", "gather", "index", "index_copy", "index_put", "index_select", "pad", "roll",
    "scatter", "select_scatter", "slice_scatter", "stack",
})  # fmt: skip
_SCALES = frozenset({
    "add", "clamp", "clamp_min", "div", "dropout", "masked_fill", "mul", "nan_to_num", "native_dropout", "pow", "rsub", "sub", "where",
})  # fmt: skip
_LAYERS = frozenset({"addmm", "linear", "matmul", "mm"})
_BENT = frozenset({"leaky_relu", "relu", "squeeze", "sum", "tanh"})
# Functions that compute features of queries and keys position by position.
_FEATURES = frozenset({
    *COPIES, *PRODUCTS, "_softmax", "add", "amax", "cat", "clamp", "clamp_min", "cos", "div", "elu", "exp", "gelu", "layer_norm",
    "linalg_vector_norm", "mul", "native_layer_norm", "neg", "pow", "relu", "sigmoid", "sin", "softmax", "softplus", "square", "sub",
    "sum", "tanh",
})  # fmt: skip
_HEADS = 64
_ENDS = frozenset({"addmm", "linear", "sum"})
_AFTER = 48  # ops between a softmax and the product with the values


def _is_of_computed(at: Place) -> bool:
    flow = at.graph.flow
    return not any(is_given(flow, s) for s in flow.operands(at.node)[-2:])


def _moves_or_mixes_heads(at: Place) -> bool:
    """Return True if an op moves or scales numbers, or mixes heads by a product with a small square weight."""
    if at.node.operation not in PRODUCTS:
        return True
    inputs = [
        at.graph.meta(v)
        for v, s in zip(at.node.inputs, at.graph.flow.operands(at.node), strict=True)
        if is_given(at.graph.flow, s)
    ]
    return len(inputs) == 1 and inputs[0].shape[-1:] == inputs[0].shape[-2:-1] and inputs[0].shape[-1] <= _HEADS


def _each_to_each(at: Place) -> bool:
    """Return True if an addition broadcasts one operand over the positions of the other operand."""
    shapes = [meta.shape for meta in at.operands]
    return (
        len(shapes[0]) == len(shapes[1]) and any(s != at.result.shape for s in shapes) and 1 in (*shapes[0], *shapes[1])
    )


def _is_narrow(at: Place) -> bool:
    return at.node.operation not in _LAYERS or at.result.shape[-1:] == (1,)


def _is_less_log_sum(at: Place) -> bool:
    operands = at.graph.flow.operands(at.node)
    summed = at.graph.flow.node(operands[1]) if len(operands) > 1 else None
    return summed is not None and summed.operation == "logsumexp" and at.graph.flow.operands(summed)[0] == operands[0]


def _maps(at: Place) -> bool:
    """Return True if an op is no matrix product, or a matrix product with a constant operand."""
    flow = at.graph.flow
    return at.node.operation not in PRODUCTS or sum(is_given(flow, s) for s in flow.operands(at.node)) == 1


def _is_spread(at: Place) -> bool:
    sizes = [meta.numel for meta in at.operands]
    return len(sizes) > 1 and sizes[0] != sizes[1]


def _moving(limit: int) -> Term:
    return through(_MOVES, _SCALES, PRODUCTS, limit=limit, where=_moves_or_mixes_heads)


_PRODUCT = op(PRODUCTS).where(_is_of_computed)["scores"] >> _moving(24)
_ADDED = op("add")(linear(), linear()).where(_each_to_each)["scores"] >> through(
    _BENT, _SCALES, _LAYERS, limit=8, where=_is_narrow
)
_SCORES = _PRODUCT | _ADDED
WEIGHING = SOFTMAX | {"acos"}
_WEIGHTS = _SCORES >> op(WEIGHING)["softmax"] | _SCORES >> op("sub").where(_is_less_log_sum) >> op("exp")["softmax"]
_MIXTURE = (
    _WEIGHTS >> _moving(12) >> op(PRODUCTS).where(_is_of_computed)["mixture"]
    | _WEIGHTS >> _moving(12) >> op("mul").where(_is_spread)["mixture"] >> op("sum")["end"]
)
_CONTEXT = op(PRODUCTS)(
    linear()["key"] >> through(_FEATURES, limit=24, where=_maps),
    linear()["value"] >> through(_FEATURES, limit=24, where=_maps),
)["context"]
_LINEAR = _CONTEXT >> through("div", "mul", limit=1) >> op(PRODUCTS)["mixture"]
_FEATURED = linear()["query"] >> through(_FEATURES, limit=24, where=_maps)


def in_parts(graph: Graph, taken: set[int]) -> Iterator[Attention]:
    """Yield attentions around each softmax whose node is not in `taken`.

    The exponential of scores minus their `logsumexp` counts as a softmax.
    """
    weighing = WEIGHING | {"exp"} if "logsumexp" in graph.by_op else WEIGHING
    gradients = graph.flow.shared(Gradients)
    for index in sorted(i for name in weighing & graph.by_op.keys() for i in graph.by_op[name]):
        if index not in taken and index not in gradients and (match := _around(graph, index, gradients)) is not None:
            query, key = match["scores"].inputs[-2:]
            yield _attention(match, query, key, _other(graph, match), graph.meta(match.value("softmax")).shape)


def _around(graph: Graph, weights: int, gradients: Gradients) -> Found | None:
    ends = graph.flow.descendants(weights, _ENDS, limit=_AFTER)
    for index in sorted(i for i in ends if graph.nodes[i].operation in PRODUCTS | {"sum"} and i not in gradients):
        for match in _MIXTURE.ways(Found(graph, {}, {}), index):
            if match.names["softmax"] == weights and not is_given(graph.flow, graph.flow.source(_other(graph, match))):
                return match
    return None


def _other(graph: Graph, found: Found) -> int:
    """Return the operand of the last product that is not the attention weights."""
    mixture = found["mixture"]
    pairs = list(zip(mixture.inputs, graph.flow.operands(mixture), strict=True))[-2:]
    return next((v for v, s in pairs if s not in found.nodes), pairs[-1][0])


def without_softmax(graph: Graph, taken: set[int]) -> Iterator[Attention]:
    """Yield attentions without softmax (linear attention): queries times the product of keys and values."""
    gradients = graph.flow.shared(Gradients)
    for index in sorted(i for name in PRODUCTS & graph.by_op.keys() for i in graph.by_op[name]):
        if index in taken or index in gradients or len(graph.nodes[index].inputs) != 2:
            continue
        ways = (match for match in _LINEAR.ways(Found(graph, {}, {}), index) if match.names["context"] not in taken)
        match = next((full for way in ways for full in _asked(graph, way)), None)
        if match is not None and _sums_over_places(graph, match):
            key, value = match["context"].inputs
            query = _other(graph, match)
            rows = graph.meta(query).shape
            places = graph.meta(key).shape[-1] or max(rows[-2:])
            yield _attention(match, query, key, value, (*rows[:-1], places))


def _asked(graph: Graph, found: Found) -> Iterable[Found]:
    asking = graph.flow.source(_other(graph, found))
    for full in _FEATURED.ways(found, asking):
        if len({full.names["query"], full.names["key"], full.names["value"]}) > 1:
            yield full


def _sums_over_places(graph: Graph, found: Found) -> bool:
    """Return True if the product of keys and values sums over the positions, so that its result has no positions."""
    result, other_shape = graph.meta(found.value("context")).shape, graph.meta(_other(graph, found)).shape
    summed = graph.meta(found["context"].inputs[0]).shape[-1]
    return len(result) >= 2 and len(other_shape) >= 2 and (summed not in result[-2:] or summed == other_shape[-2])


def _attention(found: Found, query: int, key: int, value: int, scores: tuple[int, ...]) -> Attention:
    nodes = tuple(sorted(found.nodes))
    return Attention(nodes, query, key, value, (), scores[-2], scores[-1], scores, fused=False)
