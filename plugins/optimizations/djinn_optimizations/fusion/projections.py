"""Fuse linear layers with a common input.

Examples are query, key and value of attention, and the gate and up projections of a gated MLP.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import torch

from djinn.hooks import Optimization, OptimizationContext
from djinn.planning import DataResidency, Node, OptimizationResult, Rewrite, Substitution, arguments

# The fusion saves the start of CPU ops, which takes 1 to 2 us each. With larger weights, this time does not matter. With several
# rows, splitting the result takes as long as the products. On a GPU, the split launches a kernel for each part.
MAX_WEIGHT_BYTES: Final = 1 << 20


class FuseProjections(Optimization):
    """Replace linear layers with a common input by one wider layer. Their weights are concatenated once.

    The wide layer is faster on a CPU if the input has one row and the weights are small, as in decoding.
    """

    name = "fuse_projections"
    exact = False
    tolerates_growth = True  # it substitutes only the calls that it inspected, so plans for other sizes stay correct

    def wants(self, ops: frozenset[str]) -> bool:
        """Return True if the program has linear layers."""
        return "aten::linear" in ops

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Return a substitution for each group of linear layers that can be fused."""
        on_cpu = all(device.kind == "cpu" for device in context.topology.devices)
        groups = [_substitution(context, group) for group in _groups(context)] if on_cpu else []
        if not groups:
            reason_against = (
                "no two small linear layers of one row share their input"
                if on_cpu
                else "the fusion is faster on CPUs only"
            )
            return OptimizationResult(self.name, applied=False, reason=reason_against)
        products = sum(len(s.nodes) for s in groups)
        reason = f"{products} linear layers of one row read {len(groups)} inputs: one fused layer for each input"
        return OptimizationResult(self.name, applied=True, reason=reason, rewrite=Rewrite(substitutions=tuple(groups)))


def _groups(context: OptimizationContext) -> list[list[Node]]:
    running = frozenset(context.plan.nodes)
    nodes_by_input: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    for node_id in context.graph.by_op.get("linear", ()):
        node = context.graph.nodes[node_id]
        if node_id in running and _is_fusible(context, node):
            options = arguments(node)
            weight = context.graph.meta(options["weight"])
            nodes_by_input[options["input"], weight.dtype, weight.shape[1], options["bias"] is None].append(node)
    return [group for group in nodes_by_input.values() if len(group) > 1 and _is_small(context, group)]


def _is_small(context: OptimizationContext, group: Sequence[Node]) -> bool:
    size = sum(context.graph.meta(arguments(node)["weight"]).nbytes for node in group)
    return size <= MAX_WEIGHT_BYTES


def _is_fusible(context: OptimizationContext, node: Node) -> bool:
    options = arguments(node)
    if not isinstance(options["input"], int) or not isinstance(options["weight"], int) or len(node.outputs) != 1:
        return False
    input_meta = context.graph.meta(options["input"])
    weights = [v for v in (options["weight"], options["bias"]) if v is not None]
    is_constant = all(
        context.profile.residency.get(w) is DataResidency.PERSISTENT_WEIGHT and context.graph.producer(w) is None
        for w in weights
    )
    is_one_row = len(input_meta.shape) > 0 and input_meta.numel <= input_meta.shape[-1]
    return is_constant and is_one_row and len(context.graph.meta(options["weight"]).shape) == 2


def _substitution(context: OptimizationContext, group: Sequence[Node]) -> Substitution:
    options = [arguments(node) for node in group]
    weights = [g["weight"] for g in options]
    biases = [g["bias"] for g in options if g["bias"] is not None]
    sizes = [context.graph.meta(w).shape[0] for w in weights]

    def compute(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        rows, parts = tensors[0], tensors[1:]
        weight = torch.cat(list(parts[: len(weights)]))
        bias = torch.cat(list(parts[len(weights) :])) if biases else None
        products = torch.nn.functional.linear(rows, weight, bias)
        # The copies have the layout of the replaced results, so later ops stay unchanged, even when caches have grown.
        split_copy: Any = torch.split_with_sizes_copy  # its stub has the return type None
        return list(split_copy(products, sizes, -1))

    return Substitution(
        nodes=frozenset(node.id for node in group),
        inputs=(options[0]["input"], *weights, *biases),
        outputs=tuple(node.outputs[0] for node in group),
        compute=compute,
    )
