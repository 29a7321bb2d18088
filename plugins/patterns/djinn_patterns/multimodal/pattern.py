"""The pattern: candidates in, matches out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from djinn.hooks import Pattern
from djinn.planning import ExecutionPhase, Graph, Modality, Node, PatternMatch, data_kinds
from djinn_core.planning.stages.annotating.kinds import DataKinds, entering_kinds
from djinn_patterns.multimodal.adapters import adapters, projected
from djinn_patterns.multimodal.branches import branches
from djinn_patterns.multimodal.modality_fusion import OPERATIONS, How, ModalityFusion, fusions, mirrored

_TOLD: dict[How, str] = {
    "scatter": "is put in the place of",
    "concatenation": "is put beside",
    "cross_attention": "looks at",
    "similarity": "is multiplied with",
    "comparison": "is compared with",
    "sum": "is added to",
    "product": "scales",
    "choice": "chooses among",
}
_SURE = frozenset({"scatter", "concatenation", "cross_attention", "similarity", "comparison"})


class FusionPoint(Pattern):
    """Pattern of the first fusion of several modalities."""

    name = "fusion_point"
    tolerates_growth = True
    operations = OPERATIONS

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each op at which kinds meet; the first has the branches that lead there as a hint."""
        entering = entering_kinds(graph)
        if len(entering) < 2:
            return
        kinds = data_kinds(graph)
        found = list(fusions(graph, kinds, candidates))
        facts = _Facts(graph, kinds, Modality.VISION in entering, mirrored(found))
        hints = _hints(graph, kinds, found) if found else {}
        for number, fusion in enumerate(found):
            yield facts.match(fusion, hints if number == 0 else {})


class _Facts:
    """Facts about a fusion point."""

    def __init__(self, graph: Graph, kinds: DataKinds, seen: bool, mirrored: bool) -> None:
        self._graph, self._kinds, self._seen, self._mirrored = graph, kinds, seen, mirrored
        self._adapters = adapters(graph, kinds)

    def match(self, fusion: ModalityFusion, hints: Mapping[str, Any]) -> PatternMatch:
        node, how = fusion.node, fusion.how
        mutual = self._mirrored and how == "cross_attention"
        return PatternMatch(
            pattern=FusionPoint.name,
            nodes=(node.id,),
            confidence=0.97 if how in _SURE else 0.9,
            reason=f"in node {node.id} ({node.op}) {' '.join(self._told(fusion))}",
            hints=hints,
            phase=ExecutionPhase.MULTIMODAL_FUSION if self._seen else None,
            modality=Modality.MULTIMODAL_FUSION,
            details={
                "how": "co_attention" if mutual else how,
                "kinds": fusion.names,
                "adapters": dict(self._adapted(fusion)),
            },
        )

    def _told(self, fusion: ModalityFusion) -> Iterator[str]:
        first, *others = fusion.names
        if fusion.how == "scatter" and others:
            first, others = others[-1], [first, *others[:-1]]
        yield first
        yield _TOLD[fusion.how]
        yield " and ".join(others) or first

    def _adapted(self, fusion: ModalityFusion) -> Iterator[tuple[str, str]]:
        for source, kind in fusion.kinds:
            if kind in self._adapters:
                yield kind.value, self._adapters[kind]
            elif projected(self._graph, self._kinds, source):
                yield kind.value, "projection"


def _hints(graph: Graph, kinds: DataKinds, found: Sequence[ModalityFusion]) -> Mapping[str, Any]:
    """The branches, which may run beside each other, what others need of them, and the ops where they meet."""
    apart = branches(graph, kinds)
    hint = {
        "nodes": {kind.value: tuple(branch.nodes) for kind, branch in apart.items()},
        "results": {kind.value: branch.results for kind, branch in apart.items()},
        "fusion": tuple(fusion.node.id for fusion in found),
    }
    return {"branches": (hint,)}
