"""Kinds of data that reach each node: text, images, audio. For patterns; a profile reports them as modality and lineage."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import attrs

from djinn_core.ir.flow import Flow
from djinn_core.ir.graph import Graph
from djinn_core.ir.profile import Modality
from djinn_core.planning.stages.annotating.inputs import inputs_of
from djinn_core.planning.stages.annotating.lineage import OF_KIND, data_lineage, modalities_of


@attrs.frozen
class DataKinds:
    """The nodes that each kind of data entering a graph reaches.

    Attributes:
        modalities: for each node the kind that it works on, as in `WorkloadProfile.modalities`: what is only computed for
            nodes of one kind is of that kind.
    """

    modalities: tuple[Modality, ...]
    _nodes: Sequence[int]
    _outside: Sequence[int]

    def of(self, source: int) -> frozenset[Modality]:
        """The kinds that lead to a source, as `graph.flow` has it: a node, or (negative) an input of the graph."""
        bits = self._bits(source)
        return frozenset(kind for kind, flag in OF_KIND.items() if bits & flag)

    def meet(self, sources: Sequence[int]) -> bool:
        """True if several kinds of data reach these sources together, and at most one kind reaches each of them."""
        together = 0
        for source in sources:
            bits = self._nodes[source] if source >= 0 else self._outside[~source]
            if bits & (bits - 1):
                return False
            together |= bits
        return bool(together & (together - 1))

    def _bits(self, source: int) -> int:
        return self._nodes[source] if source >= 0 else self._outside[~source]


def entering_kinds(graph: Graph) -> frozenset[Modality]:
    """The kinds of data that enter a graph."""
    return inputs_of(graph).entering


def data_kinds(graph: Graph) -> DataKinds:
    """Find which nodes each kind of data reaches; computed once per graph, in linear time."""
    found = _known.get(graph.flow)
    if found is None:
        nodes, outside = data_lineage(graph, inputs_of(graph))
        found = _known[graph.flow] = DataKinds(modalities_of(graph, nodes), nodes, outside)
    return found


def modalities_in(graph: Graph, lineage: list[int]) -> tuple[Modality, ...]:
    """`DataKinds.modalities`, computed from the lineage of the nodes where `data_kinds` has not been called yet."""
    found = _known.get(graph.flow)
    return found.modalities if found is not None else modalities_of(graph, lineage)


_known: WeakKeyDictionary[Flow, DataKinds] = WeakKeyDictionary()
