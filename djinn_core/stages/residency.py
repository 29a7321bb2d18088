"""How long values live: weights, optimizer state, gradients, inputs; whatever is not listed is an activation."""

from __future__ import annotations

from djinn_core.ir.graph import Graph
from djinn_core.ir.profile import DataResidency
from djinn_core.ir.values import storage_of
from djinn_core.ir.families import weights_of


def residency_of(graph: Graph, training: bool) -> dict[int, DataResidency]:
    """Residency of inputs, and of the gradients that outlive the program.

    A graph does not say which inputs are parameters, so: an input that stands where a product, convolution, embedding
    or normalisation expects its parameters is a weight. In training, what else is written in place is optimizer state,
    and what survives with the shape of a weight is a gradient.
    """
    weights = {v for node in graph.nodes for v in weights_of(graph, node)}
    written = {storage_of(v) for node in graph.nodes for v in node.writes}
    residency: dict[int, DataResidency] = {}
    for value in graph.inputs:
        if value in weights:
            residency[value] = DataResidency.PERSISTENT_WEIGHT
        elif training and storage_of(value) in written:
            residency[value] = DataResidency.OPTIMIZER_STATE
        else:
            residency[value] = DataResidency.INPUT
    if training:
        inputs = {storage_of(v) for v in graph.inputs}
        shapes = {graph.meta(v).shape for v in weights}
        for value in graph.outputs:
            if graph.meta(value).shape in shapes and storage_of(value) not in inputs:
                residency[value] = DataResidency.GRADIENT
    return residency
