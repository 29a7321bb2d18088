"""Residency of values: weights, caches, optimizer state, gradients, inputs. A value that is not listed is an activation."""

from __future__ import annotations

from collections.abc import Mapping

from djinn_core.ir.flow import is_view
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.handles import storage_of
from djinn_core.ir.profile import DataResidency, ExecutionPhase
from djinn_core.planning.stages.annotating.inputs import Inputs
from djinn_core.planning.stages.annotating.training import TrainingParts

# Residency of values from earlier programs. An activation from an earlier program is an input here.
_CARRIED = frozenset({
    DataResidency.GRADIENT, DataResidency.OPTIMIZER_STATE, DataResidency.PERSISTENT_WEIGHT, DataResidency.STATEFUL_KV_CACHE,
})  # fmt: skip


def residency_of_inputs(
    graph: Graph, inputs: Inputs, training: TrainingParts, known_residency: Mapping[int, DataResidency]
) -> dict[int, DataResidency]:
    """Return the residency of the graph's inputs.

    An input that the optimizer writes is a weight if a forward or backward pass reads it, else optimizer state. Any
    other value in a parameter position of a layer or norm is a weight. A residency in `_CARRIED` that is known remains.
    """
    written_storages = _written_by_optimizer(graph, training) if training else set()
    used_storages = _used_before_optimizer(graph, training) if training else set()
    residency: dict[int, DataResidency] = {}
    if not (known_residency or written_storages or inputs.weights):
        return dict.fromkeys(graph.inputs, DataResidency.INPUT)
    for value in graph.inputs:
        earlier_residency, storage = known_residency.get(value), storage_of(value)
        if earlier_residency in _CARRIED:
            residency[value] = earlier_residency
        elif storage in written_storages and storage not in used_storages:
            residency[value] = DataResidency.OPTIMIZER_STATE
        elif value in inputs.weights or storage in written_storages:
            residency[value] = DataResidency.PERSISTENT_WEIGHT
        else:
            residency[value] = DataResidency.INPUT
    created_weights = [v for v in inputs.weights if v not in residency]  # of a model that this program itself creates
    return residency | dict.fromkeys(created_weights, DataResidency.PERSISTENT_WEIGHT)


def _used_before_optimizer(graph: Graph, training: TrainingParts) -> set[int]:
    """Return the storages that forward and backward passes read, before the optimizer runs."""
    return {
        storage_of(v)
        for i, phase in training.phases.items()
        if phase is not ExecutionPhase.TRAINING_OPTIMIZER
        for v in graph.nodes[i].inputs
    }


def _written_by_optimizer(graph: Graph, training: TrainingParts) -> set[int]:
    return {
        storage_of(v)
        for i, phase in training.phases.items()
        if phase is ExecutionPhase.TRAINING_OPTIMIZER
        for v in graph.nodes[i].writes
    }


def residency_of_gradients(
    graph: Graph, residency: Mapping[int, DataResidency], training: TrainingParts
) -> dict[int, DataResidency]:
    """Return the residency of gradients in the shape of a weight, and of optimizer state that the program creates.

    New state is a copy of a gradient, or a buffer that the optimizer fills. Views of these values are included.
    """
    input_storages = {storage_of(v) for v in graph.inputs}
    shapes = {graph.meta(v).shape for v, kind in residency.items() if kind is DataResidency.PERSISTENT_WEIGHT}
    optimizer_writes = _written_by_optimizer(graph, training)
    kinds: dict[int, DataResidency] = {}  # residency by storage
    for value in graph.outputs:
        storage, maker = storage_of(value), graph.producer(value)
        if storage in input_storages or maker is None:
            continue
        is_gradient = training.gradients[maker.id] and graph.meta(value).shape in shapes
        if training.phases.get(_allocating_node(graph, maker)) is ExecutionPhase.TRAINING_OPTIMIZER:
            if is_gradient or storage in optimizer_writes:
                kinds[storage] = DataResidency.OPTIMIZER_STATE
        elif is_gradient:
            kinds[storage] = DataResidency.GRADIENT
    if not kinds:
        return {}
    return {v: kinds[storage_of(v)] for node in graph.nodes for v in node.outputs if storage_of(v) in kinds}


def _allocating_node(graph: Graph, maker: Node) -> int:
    """Return the node that allocated the memory of the result of `maker`."""
    while is_view(maker) and (earlier := graph.producer(maker.inputs[0])) is not None:
        maker = earlier
    return maker.id


def residency_of_counters(graph: Graph, residency: Mapping[int, DataResidency]) -> dict[int, DataResidency]:
    """Return the residency of integers that the program increments: the fill level of a cache, or the step count of a norm."""
    has_cache = DataResidency.STATEFUL_KV_CACHE in residency.values()
    kind = DataResidency.STATEFUL_KV_CACHE if has_cache else DataResidency.PERSISTENT_WEIGHT
    written_storages = {storage_of(v) for i in graph.by_op.get("add_", ()) for v in graph.nodes[i].writes}
    return {
        v: kind
        for v in graph.inputs
        if storage_of(v) in written_storages and not (meta := graph.meta(v)).shape and not meta.dtype.is_floating_point
    }
