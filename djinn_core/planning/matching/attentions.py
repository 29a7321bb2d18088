"""Attention in a common form, for fused ops and for explicit softmax(q·kᵀ)·v.

All patterns of a graph share one search.
"""

from __future__ import annotations

import attrs

from djinn_core.ir.arguments import arguments
from djinn_core.ir.flow import COPIES, chain, origin
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.op_families import FUSED_ATTENTION, SOFTMAX
from djinn_core.planning.matching.gradients import Gradients
from djinn_core.planning.matching.match_result import Match
from djinn_core.planning.matching.terms import op, through

PRODUCTS = frozenset({"baddbmm", "bmm", "einsum", "matmul", "mm"})
# Between scores and softmax: scale, mask, soft cap, casts. A `cat` adds a sink, which attends to nothing.
_SCORE_OPS = frozenset({
    *COPIES, "add", "cat", "clamp", "clamp_min", "div", "masked_fill", "maximum", "minimum", "mul", "nan_to_num", "sub", "tanh",
    "where",
})  # fmt: skip
# Between softmax and the product with the values: dropout in all its shapes, casts.
_WEIGHT_OPS = frozenset({*COPIES, "div", "dropout", "masked_fill", "mul", "nan_to_num", "native_dropout", "where"})
_SWAPS = frozenset({"permute", "swapaxes", "transpose"})
_SCORES = op(PRODUCTS)["scores"] >> through(_SCORE_OPS, limit=24, widest=True) >> op(SOFTMAX)["softmax"]
_EXPLICIT = _SCORES >> through(_WEIGHT_OPS, limit=6, widest=True) >> op(PRODUCTS)["mixture"]


@attrs.frozen
class Attention:
    """An attention that was found in a graph.

    Attributes:
        nodes: ids of its ops, in order.
        query: value of the query operand.
        key: value of the key operand, which may be transposed.
        value: value of the value operand.
        masks: values that are added to the scores or select among them.
        queries: number of queries per head.
        keys: number of keys per head.
        scores: shape of the scores without sinks; empty for a fused op.
        fused: True if the attention is one op.
        flagged_causal: True if the op has the argument `is_causal=True`.
    """

    nodes: tuple[int, ...]
    query: int
    key: int
    value: int
    masks: tuple[int, ...]
    queries: int
    keys: int
    scores: tuple[int, ...] = ()
    fused: bool = True
    flagged_causal: bool = False


def attentions_of(graph: Graph) -> tuple[Attention, ...]:
    """Return the attentions of a graph, in order of their last ops. Each softmax belongs to one attention."""
    fused = [
        _fused_attention(graph, graph.nodes[i])
        for name in FUSED_ATTENTION & graph.by_op.keys()
        for i in graph.by_op[name]
    ]
    if SOFTMAX.isdisjoint(graph.by_op):
        return tuple(sorted(fused, key=lambda attention: attention.nodes))
    gradients, by_softmax = graph.flow.shared(Gradients), dict[int, Attention]()
    for index in sorted(i for name in PRODUCTS & graph.by_op.keys() for i in graph.by_op[name]):
        for match in _EXPLICIT.ways(Match(graph, {}, {}), index):
            softmax = match.names["softmax"]
            if softmax not in by_softmax and (attention := _explicit_attention(graph, match)) is not None:
                if index not in gradients:
                    by_softmax[softmax] = attention
                break
    return tuple(sorted((*fused, *by_softmax.values()), key=lambda attention: attention.nodes))


def _fused_attention(graph: Graph, node: Node) -> Attention:
    options = arguments(node)
    query, key, value = (options.get(name, node.inputs[i]) for i, name in enumerate(("query", "key", "value")))
    masks = [
        options[n] for n in ("attn_mask", "attn_bias") if isinstance(options.get(n), int) and options[n] in node.inputs
    ]
    sizes = query_shape(graph, query)[-2], graph.meta(key).shape[-2]
    return Attention(
        (node.id,), query, key, value, tuple(masks), *sizes, flagged_causal=options.get("is_causal") is True
    )


def _explicit_attention(graph: Graph, match: Match) -> Attention | None:
    """Return the attention of a match; None if the scores do not fit, or the key is the weight of a layer."""
    softmax, scores, mixture = match["softmax"], match["scores"], match["mixture"]
    shape, scores_meta = graph.meta(softmax.inputs[0]).shape, graph.meta(match.value("scores"))
    if len(shape) < 2 or arguments(softmax).get("dim", -1) not in {-1, len(shape) - 1} or len(mixture.inputs) < 2:
        return None
    sinks = graph.meta(softmax.inputs[0]).numel - scores_meta.numel
    if sinks:
        shape = (*shape[:-1], shape[-1] - 1)
    if scores_meta.numel == 0 or sinks not in {0, scores_meta.numel // max(shape[-1], 1)}:
        return None
    weights = _weights_position(graph, match)
    query, key, value = *scores.inputs[-2:], mixture.inputs[-1 if weights == 0 else -2]
    rows = query_shape(graph, query)
    if shape[-1] not in graph.meta(value).shape or len(rows) < 2 or _is_layer(graph, query, key, value):
        return None
    between = [i for i in match.nodes if scores.id < i < softmax.id]
    nodes = tuple(sorted(match.nodes))
    return Attention(nodes, query, key, value, _masks(graph, scores, between), rows[-2], shape[-1], shape, fused=False)


def _weights_position(graph: Graph, match: Match) -> int:
    """Return the position of the softmax among the last two operands of its product with the values: 0 or 1."""
    first = graph.flow.operands(match["mixture"])[-2]
    return 0 if first >= match.names["softmax"] and (first in match.nodes) else 1


def _masks(graph: Graph, scores: Node, between: list[int]) -> tuple[int, ...]:
    """Return the masks: operands of ops between scores and softmax.

    Operands that come from the scores or have one element are excluded.
    """
    flow, way = graph.flow, {scores.id, *between}
    masks = list(scores.inputs[:-2])  # baddbmm adds its first operand
    for i in between:
        node = graph.nodes[i]
        if not flow.pass_through[i] and node.operation != "cat":
            masks += [v for v, s in zip(node.inputs, flow.sources[i], strict=True) if s not in way]
    return tuple(v for v in dict.fromkeys(masks) if graph.meta(v).numel > 1)


def _is_layer(graph: Graph, query: int, key: int, value: int) -> bool:
    """Return True if the key is a weight matrix and the query was computed: a linear layer with a softmax."""
    first = origin(graph, key)
    outside = graph.producer(first) is None and len(graph.meta(first).shape) == 2
    return outside and any(graph.producer(origin(graph, v)) is not None for v in (query, value))


def query_shape(graph: Graph, query: int) -> tuple[int, ...]:
    """Return the shape (batch, heads, queries, width) of a query operand before it was folded for a matrix product.

    Products fold batch and heads into one dimension. If query heads share key heads, products also fold heads and
    queries. The result is the shape of the last 4-dimensional value before the fold, with heads before queries. If no
    such value exists, the result is the operand's own shape.
    """
    shape = graph.meta(query).shape
    for value in chain(graph, query, frozenset({*COPIES, "div", "mul"})):
        candidate = graph.meta(value).shape
        if len(candidate) == 4 and candidate[-1] == shape[-1]:
            shape = candidate
        maker = graph.producer(value)
        if maker is not None and maker.operation in _SWAPS:
            break
    return shape
