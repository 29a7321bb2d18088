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
        modalities: the kind of each node, as in `WorkloadProfile.modalities`. If a node's result reaches
            nodes of one kind only, the node has that kind.
    """

    modalities: tuple[Modality, ...]
    _node_bits: Sequence[int]
    _input_bits: Sequence[int]

    def of(self, source: int) -> frozenset[Modality]:
        """Return the kinds that reach a source, as `graph.flow` numbers it: a node, or (negative) an input."""
        bits = self._bits(source)
        return frozenset(kind for kind, flag in OF_KIND.items() if bits & flag)

    def meet(self, sources: Sequence[int]) -> bool:
        """Return True if several kinds of data reach these sources in total, but at most one reaches each source."""
        all_bits = 0
        for source in sources:
            bits = self._bits(source)
            if bits & (bits - 1):
                return False
            all_bits |= bits
        return bool(all_bits & (all_bits - 1))

    def _bits(self, source: int) -> int:
        return self._node_bits[source] if source >= 0 else self._input_bits[~source]


def entering_kinds(graph: Graph) -> frozenset[Modality]:
    """Return the kinds of data that enter a graph."""
    return inputs_of(graph).entering


def data_kinds(graph: Graph) -> DataKinds:
    """Return the nodes that each kind of data reaches. They are computed once per graph, in linear time."""
    kinds = _kinds_by_flow.get(graph.flow)
    if kinds is None:
        node_bits, input_bits = data_lineage(graph, inputs_of(graph))
        kinds = _kinds_by_flow[graph.flow] = DataKinds(modalities_of(graph, node_bits), node_bits, input_bits)
    return kinds


def modalities_in(graph: Graph, lineage: list[int]) -> tuple[Modality, ...]:
    """Return the kind of data of each node: as `data_kinds` found it, or else computed from the nodes' `lineage`."""
    modalities = _kinds_by_flow.get(graph.flow)
    return modalities.modalities if modalities is not None else modalities_of(graph, lineage)


_kinds_by_flow: WeakKeyDictionary[Flow, DataKinds] = WeakKeyDictionary()
