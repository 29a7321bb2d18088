"""Measurements: numbers that enter a program and are no text, picture or sound, such as the past of a time series."""

from __future__ import annotations

from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.op_families import CONVOLUTION, NORMALISATION, weights_of
from djinn_core.stages.annotating.inputs import LAYERS, Inputs, hears

_NEAR = 64  # sources of a layer's data that are looked at
_FLAT = 3  # dimensions of a kernel that moves in one direction


def measured_in_patches(graph: Graph, inputs: Inputs) -> int | None:
    """A linear layer whose data are numbers from outside, stacked or cut into patches; None if there is none.

    Hidden states of an earlier program come with as many dimensions as the layer reads, and measurements with fewer.
    """
    for operation in ("linear", "addmm"):
        for i in graph.by_op.get(operation, ()):
            if _is_of_patches(graph, inputs, graph.nodes[i]):
                return i
    return None


def _is_of_patches(graph: Graph, inputs: Inputs, node: Node) -> bool:
    weights = set(weights_of(graph, node))
    data = next((v for v in node.inputs if v not in weights), None)
    if data is None:
        return False
    outside = _read_raw(graph, inputs, graph.flow.operand(node, data), LAYERS | NORMALISATION)
    rank = len(graph.meta(data).shape)
    return bool(outside) and all(len(graph.meta(v).shape) < rank for v in outside)


def measured_in_channels(graph: Graph, inputs: Inputs) -> int | None:
    """A convolution over time whose data are numbers from outside in a few channels, which are no sound; None if there is none."""
    for operation in sorted(CONVOLUTION):
        for i in graph.by_op.get(operation, ()):
            node = graph.nodes[i]
            kernel, data = graph.meta(node.inputs[1]).shape, graph.meta(node.inputs[0]).shape
            if len(kernel) != _FLAT or hears(data, kernel):
                continue
            if _read_raw(graph, inputs, graph.flow.operand(node, node.inputs[0]), LAYERS):
                return i
    return None


def _read_raw(graph: Graph, inputs: Inputs, source: int, stop: frozenset[str]) -> list[int]:
    """The numbers from outside that a layer reads; none if one of these ops stands before it, or an earlier program."""
    found: list[int] = []
    for ancestor in graph.flow.ancestors(source, limit=_NEAR):
        if ancestor >= 0:
            if graph.nodes[ancestor].operation in stop:
                return []
            continue
        value = graph.inputs[~ancestor]
        if value in inputs.kinds or value in inputs.earlier:
            return []
        if value not in inputs.weights and graph.meta(value).dtype.is_floating_point:
            found.append(value)
    return found
