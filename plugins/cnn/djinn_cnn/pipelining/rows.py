"""Rules for ops that process each row of a batch independently, so that they can run for a part of the batch.

The batch is the first dimension of a value. If inputs have several rows each, it is the first factor of this dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import torch

from djinn.planning import Graph, Node, arguments


@attrs.frozen(eq=False)
class Case:
    """Argument of a rule: a node, its arguments by name, and its graph."""

    graph: Graph
    node: Node
    arguments: Mapping[str, Any]

    def shape(self, value: int) -> tuple[int, ...]:
        """Return the sizes of a value."""
        return self.graph.meta(value).shape

    @property
    def result(self) -> tuple[int, ...]:
        """Sizes of the first result. For an in-place op, these are the sizes of the written operand."""
        return self.shape((*self.node.outputs, *self.node.writes)[0])


# A rule returns the operands with rows, or None if the op does not process each row independently.
Rule = Callable[[Case], tuple[int, ...] | None]


def rows_of(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """Return the operands of a node that have rows, or None if it mixes rows, draws random numbers or has no rule.

    Row i of each result depends only on row i of these operands.
    """
    if node.random or not (node.outputs or node.writes):
        return None
    case = Case(graph, node, arguments(node))
    rule = _RULES.get(node.operation)
    if rule is None and is_pointwise(node.op):
        rule = _broadcast
    return rule(case) if rule is not None else None


def is_pointwise(op: str) -> bool:
    """Return True if PyTorch tags the op as pointwise."""
    namespace, _, name = op.partition("::")
    packet, _, overload = name.partition(".")
    op_packet = getattr(getattr(torch.ops, namespace), packet, None) if namespace == "aten" else None
    overload_op = getattr(op_packet, overload or "default", None)
    return overload_op is not None and torch.Tag.pointwise in overload_op.tags


def _broadcast(case: Case) -> tuple[int, ...]:
    """Rule of elementwise ops: return the operands that have as many dimensions and rows as the result."""
    result = case.result
    return tuple(v for v in case.node.inputs if len(case.shape(v)) == len(result) and case.shape(v)[:1] == result[:1])


def _first_operand_rule(min_dims: int = 2) -> Rule:
    """Return a rule for ops of which only the first operand has rows. It must have at least `min_dims` dimensions."""

    def rule(case: Case) -> tuple[int, ...] | None:
        first = case.node.inputs[0]
        return (first,) if len(case.shape(first)) >= min_dims else None

    return rule


def _rows_in(*names: str) -> Rule:
    return lambda case: tuple(v for name in names if isinstance(v := case.arguments.get(name), int))


def _norm(case: Case) -> tuple[int, ...] | None:
    first, normalized_shape = case.node.inputs[0], case.arguments.get("normalized_shape")
    return (first,) if isinstance(normalized_shape, list) and len(normalized_shape) < len(case.shape(first)) else None


def _batch_norm(case: Case) -> tuple[int, ...] | None:
    training = case.arguments.get("training", case.arguments.get("train", False))
    return None if training or len(case.shape(case.node.inputs[0])) < 2 else case.node.inputs[:1]


def _spatial(case: Case) -> tuple[int, ...] | None:
    """Rule of ops with a batch, a channel and spatial dimensions, such as `conv2d`."""
    digits = [c for c in case.node.operation if c.isdigit()]
    first = case.node.inputs[0]
    return (first,) if digits and len(case.shape(first)) == int(digits[0]) + 2 else None


def _convolution(case: Case) -> tuple[int, ...] | None:
    data, weight = case.node.inputs[:2]
    return (data,) if len(case.shape(data)) == len(case.shape(weight)) else None


def _along_dims(*names: str, added: int = 0) -> Rule:
    """Return a rule for ops that work along dimensions other than the first.

    `names`: names of the arguments with these dimensions. `added`: number of dimensions that the op adds.
    """

    def rule(case: Case) -> tuple[int, ...] | None:
        first = case.node.inputs[0]
        dimensions = len(case.shape(first)) + added
        for name in names:
            argument = case.arguments.get(name)
            dims = argument if isinstance(argument, list) else [argument]
            if not dims or any(not isinstance(d, int) or d % dimensions == 0 for d in dims):
                return None
        return (first,)

    return rule


def _concatenation(case: Case) -> tuple[int, ...] | None:
    rows = _along_dims("dim", added=case.node.operation == "stack")(case)
    return None if rows is None else case.node.inputs


def _product(case: Case) -> tuple[int, ...] | None:
    """Rule of matrix products. If the second operand has one matrix per row, it has rows as well."""
    first, second = case.node.inputs[:2]
    if len(case.shape(first)) < 2:
        return None
    if len(case.shape(second)) < 3:
        return (first,)
    is_batched = len(case.shape(first)) == len(case.shape(second)) and case.shape(first)[0] == case.shape(second)[0]
    return (first, second) if is_batched else None


def _attention(case: Case) -> tuple[int, ...] | None:
    operands = [v for name in ("query", "key", "value") if isinstance(v := case.arguments.get(name), int)]
    if len(operands) < 3 or any(len(case.shape(v)) != 4 for v in operands) or case.arguments.get("dropout_p"):
        return None
    mask = case.arguments.get("attn_mask")
    if isinstance(mask, int) and len(case.shape(mask)) == 4 and case.shape(mask)[0] > 1:
        operands.append(mask)
    return tuple(operands)


def _permute(case: Case) -> tuple[int, ...] | None:
    dims = case.arguments.get("dims")
    first = case.node.inputs[0]
    return (first,) if isinstance(dims, list) and dims[0] % len(case.shape(first)) == 0 else None


def _pad(case: Case) -> tuple[int, ...] | None:
    pad, first = case.arguments.get("pad"), case.node.inputs[0]
    return (first,) if isinstance(pad, list) and len(pad) < 2 * len(case.shape(first)) else None


def _view(case: Case) -> tuple[int, ...] | None:
    sizes = case.arguments.get("size", case.arguments.get("shape"))
    return case.node.inputs[:1] if case.result and isinstance(sizes, list) else None


def _expand(case: Case) -> tuple[int, ...] | None:
    first = case.node.inputs[0]
    keeps_rows = len(case.shape(first)) == len(case.result) and case.shape(first)[0] == case.result[0]
    return (first,) if keeps_rows else None


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
    **dict.fromkeys(_DIM, _along_dims("dim")),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"), _norm),
    **dict.fromkeys(
        ("batch_norm", "native_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_no_update"),
        _batch_norm,
    ),
    **dict.fromkeys(("mm", "bmm", "matmul"), _product),
    **dict.fromkeys(("cat", "stack"), _concatenation),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _view),
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
        _first_operand_rule(),
    ),
    **dict.fromkeys(("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"), _attention),
    "convolution": _convolution,
    "linear": _first_operand_rule(),
    "addmm": _rows_in("mat1"),
    "embedding": _rows_in("indices"),
    "unsqueeze": _along_dims("dim", added=1),
    "transpose": _along_dims("dim0", "dim1"),
    "permute": _permute,
    "constant_pad_nd": _pad,
    "roll": _along_dims("dims"),
    "flip": _along_dims("dims"),
    "expand": _expand,
}


def resize_arguments(node: Node, graph: Graph, rows: int) -> dict[str, Any]:
    """Return the arguments of a node that contain its number of rows, changed to `rows`, by name."""
    if node.operation == "native_group_norm":
        return {"N": rows}
    if node.operation not in {"view", "_unsafe_view", "reshape", "expand"}:
        return {}
    sizes = [rows, *graph.meta(node.outputs[0]).shape[1:]]
    return {"shape" if node.operation == "reshape" else "size": sizes}
