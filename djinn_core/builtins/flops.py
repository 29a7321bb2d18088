"""Floating-point operations of the ops that multiply and add; a multiply-add counts as two, everything else as none.

This is the convention of `torch.utils.flop_counter`, whose counts the tests compare with these. What an elementwise op
costs is the memory that it moves.

- A product contracts `k` elements for each element of its result: `2 k` each, however batches are broadcast.
- A convolution does the work of a product with the unfolded input (Chellapilla et al., "High Performance Convolutional
  Neural Networks for Document Processing", 2006): each position of the result meets the whole kernel of its group. Its
  gradients by input and by weight are convolutions of the same size.
- Attention is two products, the scores and their weighted sum. Backward, fused kernels compute the scores again and then
  four products more (Dao et al., "FlashAttention", 2022, algorithm 4).
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


def _product(left: str) -> Callable[[Graph, Node, dict[str, Any]], int]:
    """A product whose argument named `left` has its last dimension contracted."""

    def rule(graph: Graph, node: Node, given: dict[str, Any]) -> int:
        return 2 * math.prod(_made(graph, node)) * math.prod(_shape(graph, given[left])[-1:])

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
    "mm": _product("self"),
    "bmm": _product("self"),
    **dict.fromkeys(("mv", "dot", "vdot"), _product("self")),
    **dict.fromkeys(("addmm", "addmm_"), _product("mat1")),
    **dict.fromkeys(("addmv", "addmv_"), _product("mat")),
    **dict.fromkeys(("baddbmm", "baddbmm_"), _product("batch1")),
    "matmul": _product("self"),
    "linear": _product("input"),
    "convolution_backward": _convolution_backward,
    "convolution_backward_overrideable": _convolution_backward,
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(FUSED_ATTENTION, _attention),
    **{f"{name}_backward": _attention_backward for name in FUSED_ATTENTION},
}
