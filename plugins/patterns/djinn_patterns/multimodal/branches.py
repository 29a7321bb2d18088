"""Find the branches of a program: ops on one modality, before an op that combines it with another modality."""

from __future__ import annotations

from djinn.planning import Graph, Modality
from djinn_core.planning.stages.annotating.kinds import DataKinds

_BRANCHES = (Modality.TEXT, Modality.VISION, Modality.AUDIO)


def branches(graph: Graph, kinds: DataKinds) -> tuple[tuple[int, ...], ...]:
    """Return the nodes of the branches for text, images and audio. No branch needs a value of another branch.

    `kinds`: modality of each node.
    """
    nodes: dict[Modality, list[int]] = {kind: [] for kind in _BRANCHES}
    for node, kind in zip(graph.nodes, kinds.modalities, strict=True):
        if kind in nodes:
            nodes[kind].append(node.id)
    return tuple(tuple(branch) for branch in nodes.values() if branch)
