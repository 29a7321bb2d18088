"""Geometry of a convolution, from the op's arguments and the shape of its weight."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

import attrs

from djinn.planning import Graph, Node, arguments

Kind = Literal["standard", "pointwise", "depthwise", "grouped", "transposed"]


@attrs.frozen
class Geometry:
    """Stride, padding and dilation of a convolution.

    Attributes:
        kind: `depthwise` has one filter per channel, `pointwise` mixes channels only, `transposed` enlarges.
        dimensions: number of spatial dimensions: 1, 2 or 3. kernel, stride: one number per dimension.
        channels: numbers of input and output channels. groups: number of channel groups.
        size: size of the output in each dimension.
    """

    kind: Kind
    dimensions: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    channels: tuple[int, int]
    groups: int
    size: tuple[int, ...]


class Geometries:
    """The geometries of a graph's convolutions, cached because most networks repeat a few."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[Hashable, Geometry] = {}

    def of(self, node: Node) -> Geometry | None:
        """Return the geometry of a convolution; None if its operands do not determine it."""
        if len(node.inputs) < 2 or not node.outputs:
            return None
        weight, result = self._graph.meta(node.inputs[1]).shape, self._graph.meta(node.outputs[0]).shape
        if len(weight) < 3:
            return None
        alike = (node.op, id(node.form), node.slots, weight, result)
        geometry = self._known.get(alike)
        if geometry is None:
            geometry = self._known[alike] = _geometry(node, weight, result)
        return geometry


def _geometry(node: Node, weight: tuple[int, ...], result: tuple[int, ...]) -> Geometry:
    options = arguments(node)
    dimensions = len(weight) - 2
    groups = _integer(options.get("groups"), 1)
    transposed = options.get("transposed") is True or "transpose" in node.operation
    other = weight[1] * groups
    channels = (weight[0], other) if transposed else (other, weight[0])
    return Geometry(
        kind=_kind(weight[2:], channels, groups, transposed),
        dimensions=dimensions,
        kernel=weight[2:],
        stride=_along(options.get("stride"), dimensions),
        channels=channels,
        groups=groups,
        size=result[-dimensions:],
    )


def _kind(kernel: tuple[int, ...], channels: tuple[int, int], groups: int, transposed: bool) -> Kind:
    if transposed:
        return "transposed"
    if groups > 1:
        return "depthwise" if groups == channels[0] else "grouped"
    return "pointwise" if set(kernel) == {1} else "standard"


def _integer(given: object, default: int) -> int:
    return given if isinstance(given, int) else default


def _along(given: object, dimensions: int) -> tuple[int, ...]:
    """Return one integer for each dimension, from a list or from one number for all."""
    numbers = [n for n in given if isinstance(n, int)] if isinstance(given, (list, tuple)) else [_integer(given, 1)]
    return tuple(numbers) if len(numbers) == dimensions else (numbers[0] if numbers else 1,) * dimensions
