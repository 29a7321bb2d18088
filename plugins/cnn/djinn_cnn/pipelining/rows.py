"""Rules for ops that process each row of a batch independently, so that they can run for a part of the batch.

The batch is the first dimension of a value. If inputs were concatenated, it is the first factor of this dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import torch

from djinn.planning import Graph, Node, arguments


@attrs.frozen(eq=False)
class At:
    """Argument of a rule.

    Attributes:
        graph: the graph.
        node: the node.
        given: arguments of the node, by name.
    """

    graph: Graph
    node: Node
    given: Mapping[str, Any]

    def shape(self, value: int) -> tuple[int, ...]:
        """Return the sizes of a value."""
        return self.graph.meta(value).shape

    @property
    def result(self) -> tuple[int, ...]:
        """Sizes of the first result. For an in-place op, these are the sizes of the written operand."""
        return self.shape((*self.node.outputs, *self.node.writes)[0])


# Returns the operands with rows, for an op that processes each row independently; None for other ops.
Rule = Callable[[At], tuple[int, ...] | None]


def rows_of(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """Return the operands of a node that have rows. If the node mixes rows, return None.

    Row i of each result depends only on row i of these operands.
    """
    if node.random or not (node.outputs or node.writes):
        return None
    at = At(graph, node, arguments(node))
    rule = _RULES.get(node.operation)
    if rule is None and is_pointwise(node.op):
        rule = _broadcast
    return rule(at) if rule is not None else None


def is_pointwise(op: str) -> bool:
    """Return True if PyTorch tags the op as pointwise."""
    namespace, _, name = op.partition("::")
    packet, _, overload = name.partition(".")
    op_packet = getattr(getattr(torch.ops, namespace), packet, None) if namespace == "aten" else None
    overload_op = getattr(op_packet, overload or "default", None)
    return overload_op is not None and torch.Tag.pointwise in overload_op.tags


def _broadcast(at: At) -> tuple[int, ...]:
    """Rule of elementwise ops: return the operands that have as many dimensions and rows as the result."""
    result = at.result
    return tuple(v for v in at.node.inputs if len(at.shape(v)) == len(result) and at.shape(v)[:1] == result[:1])


def _first(least: int = 2) -> Rule:
    """Return a rule for ops whose first operand has the rows, and at least `least` dimensions.

    All rows share the weights.
    """

    def rule(at: At) -> tuple[int, ...] | None:
        first = at.node.inputs[0]
        return (first,) if len(at.shape(first)) >= least else None

    return rule


def _named(*names: str) -> Rule:
    return lambda at: tuple(v for name in names if isinstance(v := at.given.get(name), int))


def _norm(at: At) -> tuple[int, ...] | None:
    first, over = at.node.inputs[0], at.given.get("normalized_shape")
    return (first,) if isinstance(over, list) and len(over) < len(at.shape(first)) else None


def _evaluated(at: At) -> tuple[int, ...] | None:
    training = at.given.get("training", at.given.get("train", False))
    return None if training or len(at.shape(at.node.inputs[0])) < 2 else at.node.inputs[:1]


def _spatial(at: At) -> tuple[int, ...] | None:
    """Rule of ops with a batch, a channel and spatial dimensions, such as `conv2d`."""
    digits = [c for c in at.node.operation if c.isdigit()]
    first = at.node.inputs[0]
    return (first,) if digits and len(at.shape(first)) == int(digits[0]) + 2 else None


def _convolution(at: At) -> tuple[int, ...] | None:
    data, weight = at.node.inputs[:2]
    return (data,) if len(at.shape(data)) == len(at.shape(weight)) else None


def _along(*names: str, added: int = 0) -> Rule:
    """Return a rule for ops that work along the dimensions in these arguments.

    None of them may be the first dimension.
    """

    def rule(at: At) -> tuple[int, ...] | None:
        first = at.node.inputs[0]
        dimensions = len(at.shape(first)) + added
        for name in names:
            argument = at.given.get(name)
            dims = argument if isinstance(argument, list) else [argument]
            if not dims or any(not isinstance(d, int) or d % dimensions == 0 for d in dims):
                return None
        return (first,)

    return rule


def _all_along(at: At) -> tuple[int, ...] | None:
    rows = _along("dim", added=at.node.operation == "stack")(at)
    return None if rows is None else at.node.inputs


def _product(at: At) -> tuple[int, ...] | None:
    """Rule of matrix products. If the second operand has one matrix per row, it has rows as well."""
    first, second = at.node.inputs[:2]
    if len(at.shape(first)) < 2:
        return None
    if len(at.shape(second)) < 3:
        return (first,)
    alike = len(at.shape(first)) == len(at.shape(second)) and at.shape(first)[0] == at.shape(second)[0]
    return (first, second) if alike else None


def _attention(at: At) -> tuple[int, ...] | None:
    operands = [v for name in ("query", "key", "value") if isinstance(v := at.given.get(name), int)]
    if len(operands) < 3 or any(len(at.shape(v)) != 4 for v in operands) or at.given.get("dropout_p"):
        return None
    mask = at.given.get("attn_mask")
    if isinstance(mask, int) and len(at.shape(mask)) == 4 and at.shape(mask)[0] > 1:
        operands.append(mask)
    return tuple(operands)


def _permuted(at: At) -> tuple[int, ...] | None:
    dims = at.given.get("dims")
    first = at.node.inputs[0]
    return (first,) if isinstance(dims, list) and dims[0] % len(at.shape(first)) == 0 else None


def _padded(at: At) -> tuple[int, ...] | None:
    pad, first = at.given.get("pad"), at.node.inputs[0]
    return (first,) if isinstance(pad, list) and len(pad) < 2 * len(at.shape(first)) else None


def _viewed(at: At) -> tuple[int, ...] | None:
    sizes = at.given.get("size", at.given.get("shape"))
    return at.node.inputs[:1] if at.result and isinstance(sizes, list) else None


def _expanded(at: At) -> tuple[int, ...] | None:
    first = at.node.inputs[0]
    same = len(at.shape(first)) == len(at.result) and at.shape(first)[0] == at.result[0]
    return (first,) if same else None


_SPATIAL: Final = (
    "max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d",
    "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_max_pool2d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_nearest_exact2d",
)  # fmt: skip
_DIM: Final = (
    "mean", "sum", "amax", "amin", "argmax", "argmin", "any", "all", "var", "std", "softmax", "_softmax", "log_softmax",
    "_log_softmax", "cumsum", "logsumexp", "glu", "sort", "topk", "max", "min", "select", "slice", "narrow", "split",
    "split_with_sizes", "chunk", "unbind", "squeeze", "norm", "linalg_vector_norm",
)  # fmt: skip
_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(_SPATIAL, _spatial),
    **dict.fromkeys(_DIM, _along("dim")),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"), _norm),
    **dict.fromkeys(
        ("batch_norm", "native_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_no_update"), _evaluated
    ),
    **dict.fromkeys(("mm", "bmm", "matmul"), _product),
    **dict.fromkeys(("cat", "stack"), _all_along),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _viewed),
    **dict.fromkeys(
        (
            "_to_copy",
            "to",
            "contiguous",
            "detach",
            "alias",
            "hardswish",
            "hardswish_",
            "relu6",
            "group_norm",
            "native_group_norm",
        ),
        _first(),
    ),
    **dict.fromkeys(("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"), _attention),
    "convolution": _convolution,
    "linear": _first(),
    "addmm": _named("mat1"),
    "embedding": _named("indices"),
    "unsqueeze": _along("dim", added=1),
    "transpose": _along("dim0", "dim1"),
    "permute": _permuted,
    "constant_pad_nd": _padded,
    "roll": _along("dims"),
    "flip": _along("dims"),
    "expand": _expanded,
}


def resized(node: Node, graph: Graph, rows: int) -> dict[str, Any]:
    """Return the arguments of a node that contain the number of rows, with the number `rows` instead."""
    if node.operation == "native_group_norm":
        return {"N": rows}
    if node.operation not in {"view", "_unsafe_view", "reshape", "expand"}:
        return {}
    sizes = [rows, *graph.meta(node.outputs[0]).shape[1:]]
    return {"shape" if node.operation == "reshape" else "size": sizes}
