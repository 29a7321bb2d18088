"""Geometry of a pooling op."""

from __future__ import annotations

from typing import Final, Literal

import attrs

from djinn.planning import Graph, Node, arguments

_ADAPTIVE = "_adaptive_avg_pool2d"
_OPERATIONS: Final = ("max_pool2d", "max_pool2d_with_indices", "avg_pool2d", _ADAPTIVE, "mean")
POOLINGS: Final = frozenset({"aten::mean.dim", *(f"aten::{name}" for name in _OPERATIONS)})


@attrs.frozen(eq=False)
class Pooling:
    """A pooling over the last two dimensions of a four-dimensional tensor.

    Attributes:
        node: the pooling op.
        source: input value of the op.
        kind: "largest" for a max pooling, "average" for an average pooling.
        window: size of the windows along both dimensions, in elements. Empty for adaptive poolings and means.
        step: distance of the windows along both dimensions. Empty for adaptive poolings and means.
        windows_inside: True if all windows lie within the input.
    """

    node: Node
    source: int
    kind: Literal["largest", "average"]
    window: tuple[int, ...]
    step: tuple[int, ...]
    windows_inside: bool


def pooling_of(graph: Graph, node: Node) -> Pooling | None:
    """Return the pooling that a node computes, or None if it is no pooling or does not reduce the number of elements."""
    if node.operation not in _OPERATIONS:
        return None
    if not node.inputs or not node.outputs or len(graph.meta(node.inputs[0]).shape) != 4:
        return None
    options, source = arguments(node), node.inputs[0]
    if graph.meta(node.outputs[0]).numel >= graph.meta(source).numel:
        return None
    if node.operation in {_ADAPTIVE, "mean"}:
        dims = sorted(d % 4 for d in options.get("dim") or ()) if node.operation == "mean" else [2, 3]
        is_spatial = dims == [2, 3] and options.get("dtype") is None and options.get("keepdim", True)
        return Pooling(node, source, "average", (), (), windows_inside=True) if is_spatial else None
    window = _two_numbers(options["kernel_size"])
    is_plain = not any(_two_numbers(options.get("padding", 0))) and not options.get("ceil_mode")
    is_plain = (
        is_plain and set(_two_numbers(options.get("dilation", 1))) == {1} and options.get("divisor_override") is None
    )
    kind: Literal["largest", "average"] = "largest" if node.operation.startswith("max") else "average"
    return Pooling(node, source, kind, window, _two_numbers(options.get("stride") or window), windows_inside=is_plain)


def _two_numbers(operands: object) -> tuple[int, ...]:
    numbers = [n for n in operands if isinstance(n, int)] if isinstance(operands, (list, tuple)) else [operands]
    return tuple(n for n in numbers if isinstance(n, int)) * (2 // max(1, len(numbers)))
