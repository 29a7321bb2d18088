"""The branches of a program: what works on one kind of data alone, until it meets another."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from djinn.planning import Graph, Modality
from djinn_core.planning.stages.annotating.kinds import DataKinds

_BRANCHES = (Modality.TEXT, Modality.VISION, Modality.AUDIO)


@attrs.frozen
class Branch:
    """Branch that works on one kind of data alone.

    Attributes:
        nodes: its ops, in order. None of them needs anything of another branch.
        results: the values of it that others need.
    """

    nodes: tuple[int, ...]
    results: tuple[int, ...]


def branches(graph: Graph, kinds: DataKinds) -> Mapping[Modality, Branch]:
    """The branches of a program, by kind."""
    nodes: dict[Modality, list[int]] = {kind: [] for kind in _BRANCHES}
    results: dict[Modality, dict[int, None]] = {kind: {} for kind in _BRANCHES}
    modalities = kinds.modalities
    for node, kind in zip(graph.nodes, modalities, strict=True):
        if kind in nodes:
            nodes[kind].append(node.id)
        for value in node.inputs:
            maker = graph.producer(value)
            if maker is not None and (made := modalities[maker.id]) is not kind and made in results:
                results[made][value] = None
    return {kind: Branch(tuple(mine), tuple(results[kind])) for kind, mine in nodes.items() if mine}
