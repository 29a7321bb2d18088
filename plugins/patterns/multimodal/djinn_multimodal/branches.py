"""The branches of a program: what works on one kind of data alone, until it meets another."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from djinn.dataflow import DataKinds
from djinn.hooks import Graph, Modality

_BRANCHES = (Modality.TEXT, Modality.VISION, Modality.AUDIO)


@attrs.frozen
class Branch:
    """What works on one kind of data alone.

    Attributes:
        nodes: its ops, in order. None of them needs anything of another branch.
        results: the values of it that others need.
    """

    nodes: tuple[int, ...]
    results: tuple[int, ...]


def branches(graph: Graph, kinds: DataKinds) -> Mapping[Modality, Branch]:
    """The branches of a program, by kind."""
    nodes: dict[Modality, list[int]] = {kind: [] for kind in _BRANCHES}
    for index, kind in enumerate(kinds.modalities):
        if kind in nodes:
            nodes[kind].append(index)
    return {kind: Branch(tuple(mine), _results(graph, kinds, kind, mine)) for kind, mine in nodes.items() if mine}


def _results(graph: Graph, kinds: DataKinds, kind: Modality, nodes: list[int]) -> tuple[int, ...]:
    """Values of the branch that ops outside of it use."""
    return tuple([
        value
        for index in nodes
        for value in graph.nodes[index].outputs
        if any(kinds.modalities[user.id] is not kind for user in graph.consumers(value))
    ])  # fmt: skip
