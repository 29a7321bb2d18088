"""The workload type from the tiers that may be asked, together."""

from __future__ import annotations

from djinn_core.ir.graph import Graph
from djinn_core.ir.profile import Tier
from djinn_core.stages.annotating.evidence import Evidence, Judgement
from djinn_core.stages.annotating.modules import judge_modules
from djinn_core.stages.annotating.operations import judge_operations
from djinn_core.stages.annotating.structure import judge_structure

ALL_TIERS = frozenset(Tier)


def judge(evidence: Evidence, tiers: frozenset[Tier] = ALL_TIERS) -> Judgement:
    """The surest judgement of the tiers that are asked."""
    judged: list[Judgement] = []
    if Tier.STRUCTURE in tiers:
        judged += judge_structure(evidence)
    if Tier.MODULES in tiers and (named := judge_modules(classes_in(evidence.graph))) is not None:
        judged.append(named)
    if Tier.OPERATIONS in tiers or not judged:
        judged.append(judge_operations(evidence.graph.by_op))
    return max(judged, key=lambda j: j.confidence)


def classes_in(graph: Graph) -> tuple[str, ...]:
    """Names of the classes of the modules that issued the ops, outermost first, where the graph knows them."""
    found: tuple[str, ...] = getattr(graph, "module_classes", ())
    return found
