"""Everything that is known of each node, joined from the graph and the profile's side tables."""

from __future__ import annotations

from collections import defaultdict

from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.profile import DataResidency, Lineage, PatternMatch, SemanticMetadata, WorkloadProfile


def semantic_metadata(graph: Graph, profile: WorkloadProfile) -> tuple[SemanticMetadata, ...]:
    """One record per node, in order."""
    matches: dict[int, list[PatternMatch]] = defaultdict(list)
    for match in profile.patterns:
        for node in match.nodes:
            matches[node].append(match)
    depths = _depths(graph)
    return tuple(_of_node(graph, profile, node, matches[node.id], depths[node.id]) for node in graph.nodes)


def _of_node(
    graph: Graph, profile: WorkloadProfile, node: Node, matches: list[PatternMatch], depth: int
) -> SemanticMetadata:
    metas = [graph.meta(v) for v in node.outputs]
    return SemanticMetadata(
        node=node.id,
        op=node.op,
        shapes=tuple(m.shape for m in metas),
        dtypes=tuple(str(m.dtype).removeprefix("torch.") for m in metas),
        device=next((m.device for m in metas), 0),
        module=node.module,
        role=profile.roles.get(node.id, ""),
        phase=profile.phases[node.id],
        modality=profile.modalities[node.id],
        residency=tuple(profile.residency.get(v, DataResidency.EPHEMERAL_ACTIVATION) for v in node.outputs),
        patterns=tuple(m.pattern for m in matches),
        confidence=max((m.confidence for m in matches), default=0.0),
        depth=depth,
        inputs=node.inputs,
        random=node.random,
        mutates=bool(node.writes),
        lineage=profile.lineage[node.id] if profile.lineage else Lineage.NOTHING,
    )


def _depths(graph: Graph) -> list[int]:
    """For each node the length of the longest chain of data that leads to it."""
    depths: list[int] = []
    made: dict[int, int] = {}
    for node in graph.nodes:
        depth = 1 + max((made.get(v, -1) for v in node.inputs), default=-1)
        depths.append(depth)
        made.update(dict.fromkeys((*node.outputs, *node.writes), depth))
    return depths
