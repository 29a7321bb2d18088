"""Projection layers of attention: inputs and output, and whether they project one source (self) or two (cross)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import attrs

from djinn.planning import Graph, Node, is_given, layer_at
from djinn_attention.sites import Site

_LAYERS = frozenset({"addmm", "linear", "matmul", "mm"})
_ATTENDING = frozenset({"_softmax", "baddbmm", "bmm", "embedding", "softmax"})
_ENDS = _LAYERS | _ATTENDING | {"convolution"}
# What makes shorter or normal what is projected afterwards, written out or not.
_REDUCTIONS = frozenset({
    "_fused_rms_norm", "adaptive_avg_pool2d", "avg_pool1d", "avg_pool2d", "batch_norm", "convolution",
    "cudnn_batch_norm", "group_norm", "instance_norm", "layer_norm", "max_pool2d", "max_pool2d_with_indices", "mean",
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "native_group_norm",
    "native_layer_norm", "pow", "rms_norm", "rsqrt", "std", "sqrt", "var", "var_mean", "index", "index_select", "gather",
})  # fmt: skip
_WRITES = frozenset({"index_copy", "index_put", "scatter", "slice_scatter"})
_SCALINGS = frozenset({"add", "cat", "div", "mul", "sub"})
_NEAR, _BACK, _AFTER = 64, 24, 8  # ops between attention and its layers, before those, and after attention


@attrs.frozen
class Projection:
    """A layer between what attention looks at and one of its operands.

    Attributes:
        node: id of its product. data: source of what it projects.
        narrows: whether its result is narrower than its data.
    """

    node: int
    data: int
    narrows: bool


@attrs.frozen
class FeedingLayers:
    """The layers that feed an attention, nearest first, and the one that takes its result, if there is one."""

    query: tuple[Projection, ...]
    key: tuple[Projection, ...]
    value: tuple[Projection, ...]
    output: int | None

    def nodes(self) -> dict[str, tuple[int, ...]]:
        """Ids of the products by role; equal ones where one layer serves several."""
        roles = {"query": self.query, "key": self.key, "value": self.value}
        found = {role: tuple(sorted({p.node for p in layers})) for role, layers in roles.items()}
        return found | {"output": () if self.output is None else (self.output,)}


def feeding(graph: Graph, site: Site) -> FeedingLayers:
    """The layers around an attention."""
    operands = ((site.query, site.nodes[0]), (site.key, site.nodes[0]), (site.value, site.nodes[-1]))
    query, key, value = (_before(graph, _source(graph, v, at)) for v, at in operands)
    return FeedingLayers(query, key, value, _after(graph, site.nodes[-1]))


def _source(graph: Graph, value: int, at: int) -> int:
    """The source of an operand where the attention reads it, later writes into it included."""
    node = graph.nodes[at]
    return graph.flow.operand(node, value) if value in node.inputs else graph.flow.source(value)


def _before(graph: Graph, source: int) -> tuple[Projection, ...]:
    """The layers that lead to an operand with nothing but positions, norms and the like between."""
    found: dict[int, Projection] = {}
    for at in graph.flow.ancestors(source, _ENDS, _NEAR):
        projection = _projection(graph, at)
        if projection is not None:
            found.setdefault(projection.node, projection)
    return tuple(found.values())


def _projection(graph: Graph, at: int) -> Projection | None:
    if at < 0:
        return None
    node = graph.nodes[at]
    if node.operation in _LAYERS:
        layer = layer_at(graph, node)
        if layer is None:
            return None
        narrows = graph.meta(node.outputs[0]).shape[-1] < _width(graph, node, layer.weight)
        return Projection(layer.product.id, graph.flow.beyond(layer.data), narrows)
    if node.operation == "convolution" and is_given(graph.flow, graph.flow.sources[at][1]):
        return Projection(at, graph.flow.operands(node)[0], narrows=False)
    return None


def _width(graph: Graph, node: Node, weight: int) -> int:
    """Width of the data of a layer."""
    position = 1 - graph.flow.sources[node.id][-2:].index(weight) if node.operation != "linear" else 0
    operands = node.inputs[-2:] if node.operation != "linear" else node.inputs
    return graph.meta(operands[position]).shape[-1]


def _after(graph: Graph, node: int) -> int | None:
    """The first layer that takes the result, past gates, norms and dropout."""
    for user in graph.flow.descendants(node, _LAYERS | _ATTENDING, _AFTER):
        if graph.nodes[user].operation in _LAYERS:
            layer = layer_at(graph, graph.nodes[user])
            return None if layer is None else layer.product.id
    return None


def kind(graph: Graph, site: Site, feeds: FeedingLayers) -> str | None:
    """`self` where queries and keys are of the same thing, perhaps made shorter; `cross` where not; None if it is not seen.

    Keys that were there before, as they are, are those of something that was looked at once, such as what is translated.
    """
    if not feeds.query:
        return None
    if not feeds.key:
        return "cross" if all(_source(graph, v, site.nodes[0]) < 0 for v in (site.key,)) else None
    asks, asked = ({p.data for p in layers} for layers in (feeds.query, feeds.key))
    if asks & asked:
        return "self"
    return "self" if _roots(graph, asks) & _roots(graph, asked) else "cross"


def _roots(graph: Graph, sources: Iterable[int]) -> set[int]:
    """Source that was shortened, normalised or narrowed before its projection: everything on the way back."""
    limit, queue = _BACK, deque(sources)
    seen = set(queue)
    while queue and limit:
        limit -= 1
        source = queue.popleft()
        for before in _reduced(graph, source):
            if before not in seen:
                seen.add(before)
                queue.append(before)
    return {s for s in seen if not _is_weight(graph, s)}


def _reduced(graph: Graph, source: int) -> Iterable[int]:
    if source < 0:
        return ()
    node, flow = graph.nodes[source], graph.flow
    operands = flow.operands(node)
    if node.operation in _REDUCTIONS:
        return operands[:1]
    if node.operation.removesuffix("_") in _WRITES:
        return operands[-1:]  # what is new in a buffer that is kept
    if node.operation.removesuffix("_") in _SCALINGS:
        computed = [s for s in dict.fromkeys(operands) if not is_given(flow, s)]
        same = len(computed) == 1 or node.operation in {"div", "mul", "sub"}
        return computed if same else ()
    before = _projection(graph, source) if node.operation in _LAYERS else None
    return () if before is None else (before.data,)


def _is_weight(graph: Graph, source: int) -> bool:
    """True if an input has the shape of a norm's weight rather than of data."""
    return source < 0 and len(graph.meta(graph.flow.value(source)).shape) < 2


def latent(graph: Graph, feeds: FeedingLayers) -> bool:
    """True if one layer computes keys and values from a low-rank projection (multi-head latent attention)."""
    values, queries = {p.node for p in feeds.value}, {p.node for p in feeds.query}
    both = [p for p in feeds.key if p.node in values and p.node not in queries]
    return any(_is_narrow(graph, p.data) for p in both)


def _is_narrow(graph: Graph, source: int) -> bool:
    """True if a source comes from a layer that reduces the width, with a norm in between."""
    for _ in range(_AFTER):
        if source < 0:
            return False
        node = graph.nodes[source]
        if node.operation in _LAYERS:
            before = _projection(graph, source)
            return before is not None and before.narrows
        following = list(_reduced(graph, source))
        if not following:
            return False
        source = following[0]
    return False
