"""How long values live: weights, caches, optimizer state, gradients, inputs; whatever is not listed is an activation."""

from __future__ import annotations

from collections.abc import Mapping

from djinn_core.ir.graph import Graph
from djinn_core.ir.profile import DataResidency, ExecutionPhase
from djinn_core.ir.values import storage_of
from djinn_core.stages.annotating.inputs import Inputs
from djinn_core.stages.annotating.training import Training

# What is known from earlier programs of a value that this one takes. An activation that goes on is an input here.
_CARRIED = frozenset({
    DataResidency.GRADIENT, DataResidency.OPTIMIZER_STATE, DataResidency.PERSISTENT_WEIGHT, DataResidency.STATEFUL_KV_CACHE,
})  # fmt: skip


def residency_of_inputs(
    graph: Graph, inputs: Inputs, training: Training, known: Mapping[int, DataResidency]
) -> dict[int, DataResidency]:
    """Residency of what comes from outside.

    A graph does not say which inputs are parameters, so: what stands where layers and norms expect theirs is a weight. In
    training, what else the optimizer writes in place is its state.
    """
    written = _written_by_optimizer(graph, training) if training else set()
    residency: dict[int, DataResidency] = {}
    for value in graph.inputs:
        carried = known.get(value)
        if carried in _CARRIED:
            residency[value] = carried
        elif value in inputs.weights:
            residency[value] = DataResidency.PERSISTENT_WEIGHT
        elif storage_of(value) in written:
            residency[value] = DataResidency.OPTIMIZER_STATE
        else:
            residency[value] = DataResidency.INPUT
    return residency


def _written_by_optimizer(graph: Graph, training: Training) -> set[int]:
    return {
        storage_of(v)
        for i, phase in training.phases.items()
        if phase is ExecutionPhase.TRAINING_OPTIMIZER
        for v in graph.nodes[i].writes
    }


def residency_of_gradients(graph: Graph, inputs: Inputs, training: Training) -> dict[int, DataResidency]:
    """What the backward pass leaves behind in the shape of a weight."""
    outside = {storage_of(v) for v in graph.inputs}
    shapes = {graph.meta(v).shape for v in inputs.weights}
    gradients: dict[int, DataResidency] = {}
    for value in graph.outputs:
        maker = graph.producer(value)
        if maker is None or not training.gradients[maker.id] or storage_of(value) in outside:
            continue
        if graph.meta(value).shape in shapes:
            gradients[value] = DataResidency.GRADIENT
    return gradients
