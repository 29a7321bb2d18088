"""Floating-point operations as `torch.utils.flop_counter` counts them; a multiply-add counts as two.

The formulas are PyTorch's own: whatever is in its registry is counted by it, also what a library registered there. Ops that
the counter takes apart, and that a program may hold whole, count as their parts would: those that occur in every model by
the formula of the part, all others by having the counter watch them on the meta device. Everything else counts as nothing,
as it does there: what an elementwise op costs is in `work`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import flop_counter

from djinn_core.builtins.meta_call import meta_call, meta_results
from djinn_core.ir.attention import FUSED_ATTENTION
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.operators import allowed_operators, resolve
from djinn_core.torch_private import is_composite

Shape = tuple[int, ...]
Rule = Callable[[Sequence[Shape], Shape], float]

# The counter knows the fused kernels of CUDA; those of other devices do the same work.
_ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_backward"
_SAME_AS = {f"{name}_backward": _ATTENTION_BACKWARD for name in FUSED_ATTENTION}


def flops_of(graph: Graph, node: Node) -> float:
    """Floating-point operations of `node`; 0 for ops of which PyTorch's counter counts none."""
    rule = _RULES.get(node.operation)
    if rule is not None:
        made = node.outputs[0] if node.outputs else node.writes[-1]
        return rule([graph.meta(v).shape for v in node.inputs], graph.meta(made).shape)
    formula = _formula(node)
    if formula is not None:
        args, kwargs = meta_call(graph, node)
        return float(formula(*args, **kwargs, out_val=meta_results(graph, node)))
    return _watched(graph, node) if _is_taken_apart(node.op) else 0.0


def _formula(node: Node) -> Callable[..., Any] | None:
    namespace = node.op.partition("::")[0]
    return _registered().get(_SAME_AS.get(node.operation) or f"{namespace}.{node.operation}")


_known: tuple[int, dict[str, Callable[..., Any]]] = (-1, {})


def _registered() -> dict[str, Callable[..., Any]]:
    """PyTorch's formulas by name of the op; libraries may add to them at any time."""
    global _known
    registry = flop_counter.flop_registry
    if _known[0] != len(registry):
        _known = (len(registry), {str(packet): formula for packet, formula in registry.items()})
    return _known[1]


def _is_taken_apart(op: str) -> bool:
    return op.startswith("aten::") and op in allowed_operators() and is_composite(resolve(op))


def _watched(graph: Graph, node: Node) -> float:
    """What the counter sees of the parts of a composite op."""
    args, kwargs = meta_call(graph, node)
    with torch.no_grad(), flop_counter.FlopCounterMode(display=False) as counter:
        resolve(node.op)(*args, **kwargs)
    return float(counter.get_total_flops())


def _linear(operands: Sequence[Shape], made: Shape) -> float:
    given, weight = operands[:2]
    return 2.0 * math.prod(made) * given[-1] if len(weight) == 2 else 0.0


def _matmul(operands: Sequence[Shape], made: Shape) -> float:
    left, right = operands[:2]
    return 2.0 * math.prod(made) * left[-1] if len(right) > 1 else 0.0  # products with a vector are not counted


def _attention(operands: Sequence[Shape], made: Shape) -> float:
    query, key = operands[:2]
    return 2.0 * math.prod(made[:-1]) * key[-2] * (query[-1] + made[-1])


_RULES: dict[str, Rule] = {
    "linear": _linear,
    "matmul": _matmul,
    **dict.fromkeys(FUSED_ATTENTION, _attention),
}
