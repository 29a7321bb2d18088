"""Find fusion points: the ops that first combine several modalities, and how they combine them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

from djinn.planning import FUSED_ATTENTION, Graph, Modality, Node
from djinn_core.planning.matching.attentions import attentions_of
from djinn_core.planning.stages.annotating.kinds import DataKinds

FusionKind = Literal[
    "scatter", "concatenation", "cross_attention", "similarity", "sum", "product", "choice", "comparison"
]

_SCATTERS = frozenset({
    "_index_put_impl_", "copy_", "index_copy", "index_copy_", "index_put", "index_put_", "masked_scatter",
    "masked_scatter_", "scatter", "scatter_", "slice_scatter",
})  # fmt: skip
_CONCATENATIONS = frozenset({"cat", "concat", "hstack", "stack", "vstack"})
_PRODUCTS = frozenset({"addmm", "baddbmm", "bmm", "dot", "einsum", "linear", "matmul", "mm", "mv"})
_BY_OPERATION: dict[str, FusionKind] = {
    **dict.fromkeys(_SCATTERS, "scatter"),
    **dict.fromkeys(_CONCATENATIONS, "concatenation"),
    **dict.fromkeys(FUSED_ATTENTION, "cross_attention"),
    **dict.fromkeys(_PRODUCTS, "similarity"),
    **dict.fromkeys(("cdist", "cosine_similarity", "dist", "sub"), "comparison"),
    **dict.fromkeys(("add", "add_", "addcmul", "lerp"), "sum"),
    **dict.fromkeys(("bilinear", "mul", "mul_"), "product"),
    **dict.fromkeys(("masked_fill", "masked_fill_", "where"), "choice"),
}
OPERATIONS = frozenset(_BY_OPERATION)


@attrs.frozen
class ModalityFusion:
    """An op that first combines several modalities.

    Attributes:
        node: the op.
        kind: kind of fusion.
        kinds: pairs of an operand's source and a modality of this operand.
    """

    node: Node
    kind: FusionKind
    kinds: tuple[tuple[int, Modality], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modalities, in the order of the operands."""
        return tuple(dict.fromkeys(kind.value for _, kind in self.kinds))


def fusions(graph: Graph, kinds: DataKinds, candidates: Sequence[Node]) -> Iterator[ModalityFusion]:
    """Yield the nodes among `candidates` that first combine modalities of floating-point data, not of masks and positions."""
    reads = graph.flow.sources
    for node in candidates:
        if not kinds.meet(reads[node.id]) or not _computes(graph, node):
            continue
        sources = [s for s in graph.flow.operands(node) if kinds.of(s)]
        operand_kinds = tuple((s, kind) for s in dict.fromkeys(sources) for kind in kinds.of(s))
        yield ModalityFusion(node, _fusion_kind(graph, node), operand_kinds)


def _computes(graph: Graph, node: Node) -> bool:
    """Return True if a node's first result is floating-point data, not a mask or positions."""
    results = (*node.outputs, *node.writes)
    return bool(results) and graph.meta(results[0]).dtype.is_floating_point


def _fusion_kind(graph: Graph, node: Node) -> FusionKind:
    kind = _BY_OPERATION[node.operation]
    return "cross_attention" if kind == "similarity" and _is_attention_score(graph, node) else kind


def _is_attention_score(graph: Graph, product: Node) -> bool:
    """Return True if a matrix product is part of unfused attention."""
    return any(product.id in attention.nodes for attention in graph.flow.shared(attentions_of) if not attention.fused)
