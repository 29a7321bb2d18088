"""The pattern `fusion_point`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from djinn.hooks import Pattern
from djinn.planning import ExecutionPhase, Graph, Modality, Node, PatternMatch, data_kinds
from djinn_core.planning.stages.annotating.kinds import entering_kinds
from djinn_patterns.multimodal.branches import branches
from djinn_patterns.multimodal.modality_fusion import OPERATIONS, FusionKind, ModalityFusion, fusions

_DESCRIPTIONS: dict[FusionKind, str] = {
    "scatter": "is put in the place of",
    "concatenation": "is put beside",
    "cross_attention": "looks at",
    "similarity": "is multiplied with",
    "comparison": "is compared with",
    "sum": "is added to",
    "product": "scales",
    "choice": "chooses among",
}
_CERTAIN = frozenset({"scatter", "concatenation", "cross_attention", "similarity", "comparison"})


class FusionPoint(Pattern):
    """Match ops that first combine several modalities."""

    name = "fusion_point"
    tolerates_growth = True
    operations = OPERATIONS

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Yield a match for each fusion op. The first match has a hint that lists the branches."""
        entering = entering_kinds(graph)
        if len(entering) < 2:
            return
        kinds = data_kinds(graph)
        fusion_points = list(fusions(graph, kinds, candidates))
        has_vision = Modality.VISION in entering
        branch_nodes = branches(graph, kinds) if fusion_points else ()
        for number, fusion in enumerate(fusion_points):
            yield _match(fusion, has_vision, branch_nodes if number == 0 and len(branch_nodes) > 1 else ())


def _match(fusion: ModalityFusion, has_vision: bool, branch_nodes: tuple[tuple[int, ...], ...]) -> PatternMatch:
    node, kind = fusion.node, fusion.kind
    return PatternMatch(
        pattern=FusionPoint.name,
        nodes=(node.id,),
        confidence=0.97 if kind in _CERTAIN else 0.9,
        reason=f"in node {node.id} ({node.op}) {' '.join(_description(fusion))}",
        hints={"branches": branch_nodes},
        phase=ExecutionPhase.MULTIMODAL_FUSION if has_vision else None,
        modality=Modality.MULTIMODAL_FUSION,
        details={"how": kind, "kinds": fusion.names},
    )


def _description(fusion: ModalityFusion) -> Iterator[str]:
    first, *other_names = fusion.names
    if fusion.kind == "scatter" and other_names:
        first, other_names = other_names[-1], [first, *other_names[:-1]]
    yield first
    yield _DESCRIPTIONS[fusion.kind]
    yield " and ".join(other_names) or first
