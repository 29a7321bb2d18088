"""Find the layers that compute the operands of attention, and merge parts of one attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from djinn.planning import Graph, is_weight, layer_at
from djinn_core.planning.matching.attentions import Attention

_LAYERS = frozenset({"addmm", "convolution", "linear", "matmul", "mm"})
_ENDS = _LAYERS | {"_softmax", "baddbmm", "bmm", "embedding", "softmax"}
_WRITES = frozenset({"copy_", "index_copy_", "index_put", "index_put_", "scatter", "slice_scatter"})
_MAX_OPS_TO_LAYER = 64  # maximum number of ops between attention and the layers of its operands
_MAX_OPS_TO_WRITE = 12  # maximum number of ops between an attention's result and the write of this result into a tensor
_MIN_PARTS = 3  # minimum number of softmaxes of the same layers that are parts of one attention; two may be two streams

Parts = list[Attention]


def layers_before(graph: Graph, value: int, at: int) -> dict[int, int]:
    """Return the nearest layers that compute `value`, an operand of the node `at`.

    The result maps the matrix product of each layer to the source of the layer's input.
    """
    node, layers = graph.nodes[at], dict[int, int]()
    source = graph.flow.operand(node, value) if value in node.inputs else graph.flow.source(value)
    for producer in graph.flow.ancestors(source, _ENDS, _MAX_OPS_TO_LAYER):
        if producer < 0 or graph.nodes[producer].operation not in _LAYERS:
            continue
        if graph.nodes[producer].operation == "convolution":
            if is_weight(graph.flow, graph.flow.sources[producer][1]):
                layers[producer] = graph.flow.operands(graph.nodes[producer])[0]
        elif (layer := layer_at(graph, graph.nodes[producer])) is not None:
            layers[layer.product.id] = graph.flow.skip_pass_through(layer.data)
    return layers


def merge_parts(graph: Graph, attentions: Sequence[Attention]) -> list[Parts]:
    """Group attentions that are parts of one attention: they share layers, or their results overwrite each other."""
    if len(attentions) < 2 or all(attention.fused for attention in attentions):
        return [[attention] for attention in attentions]
    groups: dict[object, Parts] = defaultdict(list)
    for number, attention in enumerate(attentions):
        layers = [frozenset(layers_before(graph, v, attention.nodes[0])) for v in (attention.query, attention.key)]
        groups[number if attention.fused or not all(layers) else tuple(layers)].append(attention)
    candidates = [
        part
        for parts in groups.values()
        for part in ([parts] if len(parts) >= _MIN_PARTS else [[single] for single in parts])
    ]
    merged: list[Parts] = []
    for parts in sorted(candidates, key=lambda parts: parts[0].nodes):
        ends = {attention.nodes[-1] for attention in (merged[-1] if merged else ()) if not attention.fused}
        if ends and not parts[0].fused and _overwrites(graph, parts[0].nodes[-1], ends):
            merged[-1] += parts
        else:
            merged.append(list(parts))
    return merged


def _overwrites(graph: Graph, end: int, ends: set[int]) -> bool:
    """Return True if the result of node `end` overwrites a result of one of `ends`."""
    for user in graph.flow.descendants(end, limit=_MAX_OPS_TO_WRITE):
        operands = graph.flow.operands(graph.nodes[user])
        if graph.nodes[user].operation in _WRITES and len(operands) > 1:
            return any(source in ends for source in graph.flow.ancestors(operands[0], limit=2 * _MAX_OPS_TO_WRITE))
    return False
