"""Which kinds of data lead to each node: text, pictures, sound. For patterns; a profile says it as modality and lineage."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from djinn_core.ir.graph import Graph
from djinn_core.ir.profile import Modality
from djinn_core.stages.annotating.inputs import inputs_of
from djinn_core.stages.annotating.lineage import OF_KIND, data_lineage, modalities_of


@attrs.frozen
class DataKinds:
    """Where the kinds of data that enter a graph get to.

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

    def several(self, source: int) -> bool:
        """Whether more than one kind leads to a source."""
        bits = self._bits(source)
        return bool(bits & (bits - 1))

    def _bits(self, source: int) -> int:
        return self._nodes[source] if source >= 0 else self._outside[~source]


def entering_kinds(graph: Graph) -> frozenset[Modality]:
    """The kinds of data that enter a graph."""
    return inputs_of(graph).entering


def data_kinds(graph: Graph) -> DataKinds:
    """Where they get to, in linear time."""
    nodes, outside = data_lineage(graph, inputs_of(graph))
    return DataKinds(modalities_of(graph, nodes), nodes, outside)
