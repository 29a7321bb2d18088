"""Kernels that do a whole layer: what they do one after the other, as ops of other kinds would do it.

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call them in evaluation, and PyTorch's counter knows nothing of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from djinn_core.ir.arguments import arguments
from djinn_core.ir.graph import Graph, Node

Part = tuple[str, Any, tuple[int, ...]]  # operation, kind and dimensions, as in `Work`


def parts_of(graph: Graph, node: Node) -> tuple[Part, ...]:
    """Steps of a kernel; empty for all those that do one thing."""
    parts = _PARTS.get(node.operation)
    return parts(graph, node) if parts is not None else ()


def _attention(rows: int, length: int, width: int, heads: int) -> tuple[Part, ...]:
    """Projections of `rows` sequences, scores, their weights and what they weigh."""
    positions, each = rows * length, width // heads
    scores = (rows * heads, length, length)
    return (
        ("linear", "product", (1, positions, 3 * width, width)),
        ("add", "pointwise", (3 * positions * width,)),  # biases, and heads side by side
        ("bmm", "product", (*scores, each)),
        ("_softmax", "softmax", (math.prod(scores),)),
        ("bmm", "product", (rows * heads, length, each, length)),
        ("clone", "copy", (positions * width,)),
        ("linear", "product", (1, positions, width, width)),
    )


def _multi_head_attention(graph: Graph, node: Node) -> tuple[Part, ...]:
    given = arguments(node)
    rows, length, width = graph.meta(given["query"]).shape
    return _attention(rows, length, width, given["num_head"])


def _encoder_layer(graph: Graph, node: Node) -> tuple[Part, ...]:
    given = arguments(node)
    shape = graph.meta(given["src"]).shape
    if len(shape) != 3:
        return ()
    rows, length, width = shape
    hidden = graph.meta(given["ffn_weight_1"]).shape[0]
    positions = rows * length
    size = (positions * width,)
    between: tuple[Part, ...] = (("add", "pointwise", size), ("native_layer_norm", "normalisation", size))
    activation = "gelu" if given["use_gelu"] else "relu"
    return (
        *_attention(rows, length, width, given["num_heads"]),
        *between,
        ("linear", "product", (1, positions, hidden, width)),
        (activation, "pointwise", (positions * hidden,)),
        ("linear", "product", (1, positions, width, hidden)),
        *between,
    )


_PARTS: Final[dict[str, Callable[[Graph, Node], tuple[Part, ...]]]] = {
    "_native_multi_head_attention": _multi_head_attention,
    "_transformer_encoder_layer_fwd": _encoder_layer,
}
