"""Recognise attention whose scores have several parts or are sums of layers, and attention without softmax."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from djinn.planning import COPIES, SOFTMAX, Gradients, Graph, is_weight, linear, op, through
from djinn_core.planning.matching.attentions import PRODUCTS, Attention
from djinn_core.planning.matching.match_result import Match, MatchedNode
from djinn_core.planning.matching.terms import Term

# Ops that concatenate scores, or split weights, without arithmetic.
_REARRANGING = frozenset({
    *COPIES, "cat", "constant_pad_nd", "copy", "fill", "gather", "index", "index_copy", "index_put", "index_select", "pad", "roll",
    "scatter", "select_scatter", "slice_scatter", "stack",
})  # fmt: skip
_SCALES = frozenset({
    "add", "clamp", "clamp_min", "div", "dropout", "masked_fill", "mul", "nan_to_num", "native_dropout", "pow", "rsub", "sub", "where",
})  # fmt: skip
_LAYERS = frozenset({"addmm", "linear", "matmul", "mm"})
_SCORE_OPS = frozenset({"leaky_relu", "relu", "squeeze", "sum", "tanh"})
# Functions that compute features of queries and keys position by position.
_FEATURES = frozenset({
    *COPIES, *PRODUCTS, "_softmax", "add", "amax", "cat", "clamp", "clamp_min", "cos", "div", "elu", "exp", "gelu", "layer_norm",
    "linalg_vector_norm", "mul", "native_layer_norm", "neg", "pow", "relu", "sigmoid", "sin", "softmax", "softplus", "square", "sub",
    "sum", "tanh",
})  # fmt: skip
_MAX_HEADS = 64
_ENDS = frozenset({"addmm", "linear", "sum"})
_MAX_OPS_TO_VALUES = 48  # maximum number of ops between a softmax and the product with the values


def _has_computed_operands(at: MatchedNode) -> bool:
    flow = at.graph.flow
    return not any(is_weight(flow, s) for s in flow.operands(at.node)[-2:])


def _moves_or_mixes_heads(at: MatchedNode) -> bool:
    """Return True if an op is no matrix product, or mixes heads by a product with a small square weight."""
    if at.node.operation not in PRODUCTS:
        return True
    inputs = [
        at.graph.meta(v)
        for v, s in zip(at.node.inputs, at.graph.flow.operands(at.node), strict=True)
        if is_weight(at.graph.flow, s)
    ]
    return len(inputs) == 1 and inputs[0].shape[-1:] == inputs[0].shape[-2:-1] and inputs[0].shape[-1] <= _MAX_HEADS


def _broadcasts_positions(at: MatchedNode) -> bool:
    """Return True if an addition broadcasts one operand over the positions of the other operand."""
    shapes = [meta.shape for meta in at.operands]
    return (
        len(shapes[0]) == len(shapes[1]) and any(s != at.result.shape for s in shapes) and 1 in (*shapes[0], *shapes[1])
    )


def _is_narrow(at: MatchedNode) -> bool:
    return at.node.operation not in _LAYERS or at.result.shape[-1:] == (1,)


def _is_less_log_sum(at: MatchedNode) -> bool:
    operands = at.graph.flow.operands(at.node)
    summed = at.graph.flow.node(operands[1]) if len(operands) > 1 else None
    return summed is not None and summed.operation == "logsumexp" and at.graph.flow.operands(summed)[0] == operands[0]


def _maps_positions(at: MatchedNode) -> bool:
    """Return True if an op is no matrix product, or a matrix product with exactly one constant operand."""
    flow = at.graph.flow
    return at.node.operation not in PRODUCTS or sum(is_weight(flow, s) for s in flow.operands(at.node)) == 1


def _is_spread(at: MatchedNode) -> bool:
    sizes = [meta.numel for meta in at.operands]
    return len(sizes) > 1 and sizes[0] != sizes[1]


def _moving(limit: int) -> Term:
    return through(_REARRANGING, _SCALES, PRODUCTS, limit=limit, where=_moves_or_mixes_heads)


_PRODUCT_SCORES = op(PRODUCTS).where(_has_computed_operands)["scores"] >> _moving(24)
_ADDITIVE_SCORES = op("add")(linear(), linear()).where(_broadcasts_positions)["scores"] >> through(
    _SCORE_OPS, _SCALES, _LAYERS, limit=8, where=_is_narrow
)
_SCORES = _PRODUCT_SCORES | _ADDITIVE_SCORES
WEIGHING = SOFTMAX | {"acos"}
_WEIGHTS = _SCORES >> op(WEIGHING)["softmax"] | _SCORES >> op("sub").where(_is_less_log_sum) >> op("exp")["softmax"]
_MIXTURE = (
    _WEIGHTS >> _moving(12) >> op(PRODUCTS).where(_has_computed_operands)["mixture"]
    | _WEIGHTS >> _moving(12) >> op("mul").where(_is_spread)["mixture"] >> op("sum")["end"]
)
_CONTEXT = op(PRODUCTS)(
    linear()["key"] >> through(_FEATURES, limit=24, where=_maps_positions),
    linear()["value"] >> through(_FEATURES, limit=24, where=_maps_positions),
)["context"]
_LINEAR = _CONTEXT >> through("div", "mul", limit=1) >> op(PRODUCTS)["mixture"]
_QUERY_FEATURES = linear()["query"] >> through(_FEATURES, limit=24, where=_maps_positions)


def attentions_in_parts(graph: Graph, matched: set[int]) -> Iterator[Attention]:
    """Yield the attention around each softmax whose node is not in `matched`.

    The exponential of scores minus their `logsumexp` counts as a softmax.
    """
    weighing = WEIGHING | {"exp"} if "logsumexp" in graph.by_op else WEIGHING
    gradients = graph.flow.shared(Gradients)
    for index in sorted(i for name in weighing & graph.by_op.keys() for i in graph.by_op[name]):
        if (
            index not in matched
            and index not in gradients
            and (match := _match_around(graph, index, gradients)) is not None
        ):
            query, key = match["scores"].inputs[-2:]
            yield _attention(match, query, key, _other_operand(graph, match), graph.meta(match.value("softmax")).shape)


def _match_around(graph: Graph, weights: int, gradients: Gradients) -> Match | None:
    ends = graph.flow.descendants(weights, _ENDS, limit=_MAX_OPS_TO_VALUES)
    for index in sorted(i for i in ends if graph.nodes[i].operation in PRODUCTS | {"sum"} and i not in gradients):
        for match in _MIXTURE.ways(Match(graph, {}, {}), index):
            if match.names["softmax"] == weights and not is_weight(
                graph.flow, graph.flow.source(_other_operand(graph, match))
            ):
                return match
    return None


def _other_operand(graph: Graph, match: Match) -> int:
    """Return the operand of a match's last product that is outside the match: values, or queries (linear attention)."""
    mixture = match["mixture"]
    pairs = list(zip(mixture.inputs, graph.flow.operands(mixture), strict=True))[-2:]
    return next((v for v, s in pairs if s not in match.nodes), pairs[-1][0])


def without_softmax(graph: Graph, matched: set[int]) -> Iterator[Attention]:
    """Yield attentions without softmax (linear attention): queries times the product of keys and values.

    Nodes in `matched` are left out.
    """
    gradients = graph.flow.shared(Gradients)
    for index in sorted(i for name in PRODUCTS & graph.by_op.keys() for i in graph.by_op[name]):
        if index in matched or index in gradients or len(graph.nodes[index].inputs) != 2:
            continue
        matches = (
            match for match in _LINEAR.ways(Match(graph, {}, {}), index) if match.names["context"] not in matched
        )
        match = next(
            (complete_match for partial in matches for complete_match in _matches_with_query(graph, partial)), None
        )
        if match is not None and _sums_over_positions(graph, match):
            key, value = match["context"].inputs
            query = _other_operand(graph, match)
            rows = graph.meta(query).shape
            key_count = graph.meta(key).shape[-1] or max(rows[-2:])
            yield _attention(match, query, key, value, (*rows[:-1], key_count))


def _matches_with_query(graph: Graph, match: Match) -> Iterable[Match]:
    query_source = graph.flow.source(_other_operand(graph, match))
    for complete_match in _QUERY_FEATURES.ways(match, query_source):
        if len({complete_match.names["query"], complete_match.names["key"], complete_match.names["value"]}) > 1:
            yield complete_match


def _sums_over_positions(graph: Graph, match: Match) -> bool:
    """Return True if the product of keys and values sums over the positions, so its result has no position dimension."""
    result, other_shape = graph.meta(match.value("context")).shape, graph.meta(_other_operand(graph, match)).shape
    summed = graph.meta(match["context"].inputs[0]).shape[-1]
    return len(result) >= 2 and len(other_shape) >= 2 and (summed not in result[-2:] or summed == other_shape[-2])


def _attention(match: Match, query: int, key: int, value: int, scores: tuple[int, ...]) -> Attention:
    nodes = tuple(sorted(match.nodes))
    return Attention(nodes, query, key, value, (), scores[-2], scores[-1], scores, fused=False)
