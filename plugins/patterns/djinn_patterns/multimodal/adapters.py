"""Adapters from one branch to another: a projection, or questions that were learnt and look at it."""

from __future__ import annotations

from typing import Literal

from djinn.planning import FUSED_ATTENTION, SOFTMAX, Graph, Modality, arguments, layer_at, query_shape
from djinn_core.planning.stages.annotating.kinds import DataKinds

Adapter = Literal["resampler", "pooling", "projection"]
_STEPS = 12  # ops that may stand between a projection and the fusion
_RATIOS = frozenset({"div", "div_", "mul", "mul_"})
_SCORES = frozenset({"baddbmm", "bmm", "einsum", "matmul"})


def adapters(graph: Graph, kinds: DataKinds) -> dict[Modality, Adapter]:
    """By kind of data, attention in which learnt questions look at nothing else: many of them, or one that sums it up."""
    found: dict[Modality, Adapter] = {}
    for operation in sorted(FUSED_ATTENTION | SOFTMAX):
        for index in graph.by_op.get(operation, ()):
            kind = kinds.modalities[index]
            asked = _asked(graph, kinds, index)
            if kind not in found and asked:
                found[kind] = "pooling" if asked == 1 else "resampler"
    return found


def _asked(graph: Graph, kinds: DataKinds, attention: int) -> int:
    """Number of queries of an attention, where no data leads to them but some to what they look at; else none."""
    flow, node = graph.flow, graph.nodes[attention]
    if node.operation in SOFTMAX:
        before = flow.ancestors(attention, _SCORES, limit=16)
        node = next((graph.nodes[s] for s in before if s >= 0 and graph.nodes[s].operation in _SCORES), node)
        query, key = node.inputs[-2:] if len(node.inputs) > 1 else node.inputs * 2
    else:
        query, key = (arguments(node).get(name, node.inputs[i]) for i, name in enumerate(("query", "key")))
    if kinds.of(flow.operand(node, query)) or not kinds.of(flow.operand(node, key)):
        return 0
    return query_shape(graph, query)[-2]


def projected(graph: Graph, kinds: DataKinds, source: int) -> bool:
    """True if `source` comes from a projection layer, through no residual sum."""
    flow = graph.flow
    for _ in range(_STEPS):
        node = flow.node(source)
        if node is None:
            return False
        if layer_at(graph, node) is not None:
            return True
        data = [s for s in dict.fromkeys(flow.operands(node)) if kinds.of(s)]
        if not data or (len(data) > 1 and node.operation not in _RATIOS):
            return False
        source = data[0]
    return False
