"""Ops that attention is made of: PyTorch's fused kernels and softmaxes; and the shape of the queries."""

from __future__ import annotations

from djinn_core.ir.dataflow import COPIES, chain
from djinn_core.ir.graph import Graph

FUSED_ATTENTION = frozenset({
    "_scaled_dot_product_attention_math", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable",
    "scaled_dot_product_attention",
})  # fmt: skip
SOFTMAX = frozenset({"_safe_softmax", "_softmax", "softmax"})
_SWAPS = frozenset({"permute", "swapaxes", "transpose"})
_SCALED = frozenset({*COPIES, "div", "mul"})


def query_shape(graph: Graph, query: int) -> tuple[int, ...]:
    """Shape (batch, heads, queries, width) of a query operand before it was folded for a matrix product.

    Products fold batch and heads into one dimension, and, where query heads share key heads, heads and queries. The shape
    is that of the last value with four dimensions before heads and queries were swapped into place; where there is none,
    the operand's own.
    """
    shape = graph.meta(query).shape
    for value in chain(graph, query, _SCALED):
        candidate = graph.meta(value).shape
        if len(candidate) == 4 and candidate[-1] == shape[-1]:
            shape = candidate
        maker = graph.producer(value)
        if maker is not None and maker.operation in _SWAPS:
            break
    return shape
