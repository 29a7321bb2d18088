"""Floating-point operations as `torch.utils.flop_counter` counts them; a multiply-add counts as two.

The formulas come from PyTorch's registry. Libraries may register more. The FLOPs of a composite op are the sum of its
parts. Common composite ops have a formula; for all others, the counter runs the op on the meta device. All other ops
count as zero, as in PyTorch; `work` has the arithmetic of pointwise ops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import flop_counter

from djinn_core.ir.arguments import call_arguments
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.op_families import FUSED_ATTENTION
from djinn_core.ir.operators import allowed_operators, resolve
from djinn_core.ir.values import TensorMeta
from djinn_core.torch_private import is_composite

META = torch.device("meta")


def meta_call(graph: Graph, node: Node) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments of `node`, with tensors on the meta device."""
    operands = [meta_tensor(graph.meta(v)) for v in node.inputs]
    return call_arguments(node.form, operands, node.slots, META, cpu=META)


def meta_results(graph: Graph, node: Node) -> Any:
    """Return the results of `node` as meta tensors: a tensor, or a list if the op returns a list.

    The list has None for each result that is not a new value.
    """
    metas = [meta_tensor(graph.meta(v)) for v in node.outputs or node.writes[-1:]]
    if not node.form.sequence:
        return metas[0] if metas else None
    remaining = iter(metas)
    return [next(remaining, None) if kind == "new" else None for kind in node.form.results]


def meta_tensor(meta: TensorMeta) -> torch.Tensor:
    """Return an empty meta tensor with this metadata."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=META)


Shape = tuple[int, ...]
Rule = Callable[[Sequence[Shape], Shape], float]
RECURRENT = frozenset({"gru", "lstm", "rnn_relu", "rnn_tanh"})


def flops_of(graph: Graph, node: Node) -> float:
    """Return the floating-point operations of `node`; 0 if PyTorch's counter has no formula for the op."""
    formula = _registered_formulas().get(_counted_name(node.op))
    rule = _RULES.get(node.operation) if formula is None else None
    if rule is not None:
        result = node.outputs[0] if node.outputs else node.writes[-1]
        return rule([graph.meta(v).shape for v in node.inputs], graph.meta(result).shape)
    if formula is not None:
        args, kwargs = meta_call(graph, node)
        try:
            return float(formula(*args, **kwargs, out_val=meta_results(graph, node)))
        except (AssertionError, ValueError):  # shapes that the formula does not expect, even if a kernel accepts them
            return 0.0
    return _flops_of_parts(graph, node) if _is_composite_op(node.op) else 0.0


@functools.lru_cache(maxsize=4096)
def _counted_name(op: str) -> str:
    """Return the name of the op in the counter's registry: `aten.mm` for `aten::mm.out`."""
    return ".".join(op.replace("::", ".").split(".")[:2])


_formulas: tuple[int, dict[str, Callable[..., Any]]] = (-1, {})


def _registered_formulas() -> dict[str, Callable[..., Any]]:
    """Return PyTorch's formulas by op name. Libraries may add formulas at any time."""
    global _formulas
    registry = flop_counter.flop_registry
    if _formulas[0] != len(registry):
        _formulas = (len(registry), {str(packet): formula for packet, formula in registry.items()})
    return _formulas[1]


@functools.lru_cache(maxsize=4096)
def _is_composite_op(op: str) -> bool:
    return op.startswith("aten::") and op in allowed_operators() and is_composite(resolve(op))


def _flops_of_parts(graph: Graph, node: Node) -> float:
    """Return the FLOPs that the counter reports for the parts of a composite op."""
    args, kwargs = meta_call(graph, node)
    with torch.no_grad(), flop_counter.FlopCounterMode(display=False) as counter:
        resolve(node.op)(*args, **kwargs)
    return float(counter.get_total_flops())


def _linear(operands: Sequence[Shape], result: Shape) -> float:
    activation, weight = operands[:2]
    return 2.0 * math.prod(result) * activation[-1] if len(weight) == 2 else 0.0


def _matmul(operands: Sequence[Shape], result: Shape) -> float:
    left, right = operands[:2]
    return 2.0 * math.prod(result) * left[-1] if len(right) > 1 else 0.0  # products with a vector are not counted


def _grouped_matmul(operands: Sequence[Shape], result: Shape) -> float:
    """Return the FLOPs of a grouped matmul: each row is multiplied by the matrix of its group.

    With two matrices, groups divide the dimension that is summed over.
    """
    left, right = operands[:2]
    groups = result[0] if len(left) == len(right) == 2 else 1
    return 2.0 * math.prod(result) * left[-1] / groups


def _attention(operands: Sequence[Shape], result: Shape) -> float:
    query, key = operands[:2]
    return 2.0 * math.prod(result[:-1]) * key[-2] * (query[-1] + result[-1])


def _attention_backward(operands: Sequence[Shape], _: Shape) -> float:
    """Return the FLOPs of the backward pass: each of the two products has a gradient for both operands."""
    query, key, value = operands[1:4]
    return 4.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _recurrent(operands: Sequence[Shape], _: Shape) -> float:
    """Return the FLOPs of a recurrent op: every row of every step times every matrix of every layer."""
    rows = math.prod(operands[0][:-1])
    return 2.0 * rows * sum(math.prod(shape) for shape in operands[1:] if len(shape) == 2)


def _nothing(_: Sequence[Shape], __: Shape) -> float:
    return 0.0


# Ops that the counter decomposes on the meta device, and kernels without a formula.
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("batch_norm", "layer_norm", "rms_norm"), _nothing),
    "linear": _linear,
    "matmul": _matmul,
    "_grouped_mm": _grouped_matmul,
    **dict.fromkeys(RECURRENT, _recurrent),
    **dict.fromkeys(FUSED_ATTENTION, _attention),
    **{f"{name}_backward": _attention_backward for name in FUSED_ATTENTION},
}
