"""Floating-point operations of the ops that multiply and add; a multiply-add counts as two, everything else as none.

This is the convention of `torch.utils.flop_counter`. What an elementwise op costs is the memory that it moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from djinn_core.ir.arguments import arguments
from djinn_core.ir.attention import FUSED_ATTENTION
from djinn_core.ir.graph import Graph, Node

Shape = tuple[int, ...]


def flops_of(graph: Graph, node: Node) -> float:
    """Floating-point operations of `node`; 0 for ops that do not multiply matrices."""
    rule = _RULES.get(node.operation)
    return float(rule(graph, node, arguments(node))) if rule else 0.0


def _shape(graph: Graph, value: int) -> Shape:
    return graph.meta(value).shape


def _made(graph: Graph, node: Node) -> Shape:
    """Shape of the first result, also where the op writes into an operand (`out=`)."""
    return _shape(graph, node.outputs[0] if node.outputs else node.writes[-1])


def _product(left: str, right: str, *, transposed: bool = False) -> Callable[[Graph, Node, dict[str, Any]], int]:
    """A product of the arguments named `left` and `right`, the last dimension of `left` contracted."""

    def rule(graph: Graph, node: Node, given: dict[str, Any]) -> int:
        a, b = _shape(graph, given[left]), _shape(graph, given[right])
        columns = 1 if len(b) == 1 else b[-2] if transposed else b[-1]
        rows = math.prod(a[:-1])
        if len(b) > 2 and not transposed:  # batches are broadcast, so count them on the result
            rows = math.prod(_made(graph, node)) // columns
        return 2 * rows * a[-1] * columns

    return rule


def _convolution(graph: Graph, node: Node, given: dict[str, Any]) -> int:
    weight = _shape(graph, given["weight"])
    transposed = bool(given.get("transposed")) or "transpose" in node.operation
    positions = _shape(graph, node.inputs[0]) if transposed else _made(graph, node)
    return _convolution_work(_batched(positions, weight), weight)


def _batched(shape: Shape, weight: Shape) -> Shape:
    return shape if len(shape) == len(weight) else (1, *shape)


def _convolution_work(positions: Shape, weight: Shape) -> int:
    """Each position of the result (of the input, where transposed) meets the whole kernel of its group."""
    return 2 * positions[0] * math.prod(positions[2:]) * math.prod(weight)


def _convolution_backward(graph: Graph, _: Node, given: dict[str, Any]) -> int:
    weight = _shape(graph, given["weight"])
    positions = _shape(graph, given["input"] if given["transposed"] else given["grad_output"])
    wanted = sum(bool(want) for want in given["output_mask"][:2])  # the bias's gradient is a sum
    return wanted * _convolution_work(positions, weight)


def _attention(graph: Graph, _: Node, given: dict[str, Any]) -> int:
    q, k, v = (_shape(graph, given[n]) for n in ("query", "key", "value"))
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _attention_backward(graph: Graph, _: Node, given: dict[str, Any]) -> int:
    """The scores again, then gradients of the scores and of the three inputs."""
    q, k, v = (_shape(graph, given[n]) for n in ("query", "key", "value"))
    return 2 * math.prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1])


_CONVOLUTIONS = (
    "convolution", "_convolution", "convolution_overrideable", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d",
)  # fmt: skip
_RULES: dict[str, Callable[[Graph, Node, dict[str, Any]], int]] = {
    "mm": _product("self", "mat2"),
    "bmm": _product("self", "mat2"),
    "mv": _product("self", "vec"),
    "addmm": _product("mat1", "mat2"),
    "addmv": _product("mat", "vec"),
    "baddbmm": _product("batch1", "batch2"),
    "matmul": _product("self", "other"),
    "linear": _product("input", "weight", transposed=True),
    "convolution_backward": _convolution_backward,
    "convolution_backward_overrideable": _convolution_backward,
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(FUSED_ATTENTION, _attention),
    **{f"{name}_backward": _attention_backward for name in FUSED_ATTENTION},
}
