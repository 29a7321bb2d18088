"""Find fusion points: the ops that first combine several modalities, and how they combine them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

from djinn.planning import FUSED_ATTENTION, Graph, Modality, Node
from djinn_core.planning.matching.attentions import attentions_of
from djinn_core.planning.stages.annotating.kinds import DataKinds

How = Literal["scatter", "concatenation", "cross_attention", "similarity", "sum", "product", "choice", "comparison"]

_SCATTERS = frozenset({
    "_index_put_impl_", "copy_", "index_copy", "index_copy_", "index_put", "index_put_", "masked_scatter",
    "masked_scatter_", "scatter", "scatter_", "slice_scatter",
})  # fmt: skip
_CONCATENATIONS = frozenset({"cat", "concat", "hstack", "stack", "vstack"})
_PRODUCTS = frozenset({"addmm", "baddbmm", "bmm", "dot", "einsum", "linear", "matmul", "mm", "mv"})
_BY_OPERATION: dict[str, How] = {
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
        how: kind of fusion.
        kinds: each operand that has a modality, with its modality.
    """

    node: Node
    how: How
    kinds: tuple[tuple[int, Modality], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the modalities, in the order of the operands."""
        return tuple(dict.fromkeys(kind.value for _, kind in self.kinds))


def fusions(graph: Graph, kinds: DataKinds, candidates: Sequence[Node]) -> Iterator[ModalityFusion]:
    """Yield the fusions among `candidates`. A fusion of only masks and positions is left out."""
    reads = graph.flow.sources
    for node in candidates:
        if not kinds.meet(reads[node.id]) or not _computes(graph, node):
            continue
        sources = [s for s in graph.flow.operands(node) if kinds.of(s)]
        met = tuple((s, kind) for s in dict.fromkeys(sources) for kind in kinds.of(s))
        yield ModalityFusion(node, _fusion_kind(graph, node), met)


def _computes(graph: Graph, node: Node) -> bool:
    """Return True if a node's results are floating-point data, and neither masks nor positions."""
    results = (*node.outputs, *node.writes)
    return bool(results) and graph.meta(results[0]).dtype.is_floating_point


def _fusion_kind(graph: Graph, node: Node) -> How:
    how = _BY_OPERATION[node.operation]
    return "cross_attention" if how == "similarity" and _is_attention_score(graph, node) else how


def _is_attention_score(graph: Graph, product: Node) -> bool:
    """Return True if a matrix product computes the scores of unfused attention.

    Such scores become the weights of another product.
    """
    return any(product.id in attention.nodes for attention in graph.flow.shared(attentions_of) if not attention.fused)
