"""Kinds of data that reach each node: text, images, audio.

Patterns use them; a profile reports them as modality and lineage.
"""

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
    """The nodes that each kind of input data reaches.

    Attributes:
        modalities: the kind of each node, as in `WorkloadProfile.modalities`. A node whose result only reaches nodes of one kind
            has that kind.
    """

    modalities: tuple[Modality, ...]
    _nodes: Sequence[int]
    _outside: Sequence[int]

    def of(self, source: int) -> frozenset[Modality]:
        """Return the kinds that reach a source, as `graph.flow` numbers it: a node, or (negative) an input."""
        bits = self._bits(source)
        return frozenset(kind for kind, flag in OF_KIND.items() if bits & flag)

    def meet(self, sources: Sequence[int]) -> bool:
        """Return True if several kinds of data reach these sources in total, but at most one kind each of them."""
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
    """Return the kinds of data that enter a graph."""
    return inputs_of(graph).entering


def data_kinds(graph: Graph) -> DataKinds:
    """Return the nodes that each kind of data reaches; computed once per graph, in linear time."""
    kinds = _known.get(graph.flow)
    if kinds is None:
        nodes, outside = data_lineage(graph, inputs_of(graph))
        kinds = _known[graph.flow] = DataKinds(modalities_of(graph, nodes), nodes, outside)
    return kinds


def modalities_in(graph: Graph, lineage: list[int]) -> tuple[Modality, ...]:
    """Return `DataKinds.modalities`. If `data_kinds` was not called yet, compute it from the lineage of the nodes."""
    modalities = _known.get(graph.flow)
    return modalities.modalities if modalities is not None else modalities_of(graph, lineage)


_known: WeakKeyDictionary[Flow, DataKinds] = WeakKeyDictionary()
