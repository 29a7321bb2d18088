"""Lineage and kind of data of every node, computed in one forward and one backward walk."""

from __future__ import annotations

from collections.abc import Mapping

from djinn_core.ir.graph import Graph
from djinn_core.ir.profile import DataResidency, Lineage, Modality
from djinn_core.planning.stages.annotating.inputs import Inputs

OF_KIND = {Modality.TEXT: Lineage.TEXT, Modality.VISION: Lineage.VISION, Modality.AUDIO: Lineage.AUDIO}
_OF_RESIDENCY = {
    DataResidency.PERSISTENT_WEIGHT: Lineage.WEIGHT,
    DataResidency.STATEFUL_KV_CACHE: Lineage.STATE,
    DataResidency.GRADIENT: Lineage.GRADIENT,
    DataResidency.OPTIMIZER_STATE: Lineage.OPTIMIZER_STATE,
}
_OF_EARLIER = OF_KIND | {Modality.MULTIMODAL_FUSION: Lineage.TEXT | Lineage.VISION}
_DATA = int(Lineage.TEXT | Lineage.VISION | Lineage.AUDIO)
_MODALITY = {int(flag): kind for kind, flag in OF_KIND.items()} | {0: Modality.UNKNOWN}
_RANDOM = int(Lineage.RANDOM)


def lineage_of(graph: Graph, inputs: Inputs, residency: Mapping[int, DataResidency]) -> list[int]:
    """Return for each node the `Lineage` bits that its results derive from."""
    input_bits = [_of_input(value, inputs, residency) for value in graph.inputs]
    entries = {maker.id: int(Lineage.WEIGHT) for v in inputs.weights if (maker := graph.producer(v)) is not None}
    entries |= {node: int(OF_KIND[kind]) for node, kind in inputs.entries.items()}
    entries |= {node.id: entries.get(node.id, 0) | _RANDOM for node in graph.nodes if node.random}
    return _propagated_bits(graph, input_bits, entries)


def data_lineage(graph: Graph, inputs: Inputs) -> tuple[list[int], list[int]]:
    """Return the `Lineage` bits of each node, and of each input. Only bits for kinds of data are set."""
    input_bits = [int(OF_KIND[inputs.kinds[v]]) if v in inputs.kinds else 0 for v in graph.inputs]
    return _propagated_bits(
        graph, input_bits, {node: int(OF_KIND[kind]) for node, kind in inputs.entries.items()}
    ), input_bits


def _propagated_bits(graph: Graph, input_bits: list[int], entries: Mapping[int, int]) -> list[int]:
    """Return the lineage bits of each node.

    `input_bits` has the bits of each input, and `entries` the bits that a node adds itself.
    """
    bits: list[int] = []
    for index, sources in enumerate(graph.flow.sources):
        node_bits = entries.get(index, 0)
        for source in sources:
            node_bits |= bits[source] if source >= 0 else input_bits[~source]
        bits.append(node_bits)
    return bits


def _of_input(value: int, inputs: Inputs, residency: Mapping[int, DataResidency]) -> int:
    kind = inputs.kinds.get(value)
    if kind is not None:
        return int(OF_KIND[kind])
    earlier = _OF_EARLIER.get(inputs.earlier.get(value, Modality.UNKNOWN))
    if earlier is not None:
        return int(earlier)
    return int(_OF_RESIDENCY.get(residency.get(value, DataResidency.INPUT), Lineage.OTHER_INPUT))


def kind_of(lineage: int) -> Modality:
    """Return the kind of data of a lineage, or `MULTIMODAL_FUSION` for several kinds."""
    return _MODALITY.get(lineage & _DATA, Modality.MULTIMODAL_FUSION)


def modalities_of(graph: Graph, bits: list[int]) -> tuple[Modality, ...]:
    """Return the kind of data of each node. If a node's result reaches nodes of one kind only, it has that kind.

    A node whose result no node uses, such as a mask that is only tested, has the kind of its operands.
    """
    kinds = [b & _DATA for b in bits]
    sources_of = graph.flow.sources
    user_kinds = [0] * len(kinds)
    for node in range(len(kinds) - 1, -1, -1):
        node_kinds = kinds[node] or user_kinds[node]
        if not kinds[node] and node_kinds in _MODALITY:
            kinds[node] = node_kinds
        for source in sources_of[node]:
            if source >= 0:
                user_kinds[source] |= node_kinds
    for node, kind in enumerate(kinds):
        if not kind and not user_kinds[node]:
            operand_kinds = 0
            for source in sources_of[node]:
                operand_kinds |= kinds[source] if source >= 0 else 0
            if operand_kinds in _MODALITY:
                kinds[node] = operand_kinds
    return tuple([kind_of(k) for k in kinds])
