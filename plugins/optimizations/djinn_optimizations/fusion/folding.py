"""Fold batch norms into convolutions.

In evaluation, a batch norm multiplies and shifts each channel. The preceding convolution does both if its weights and
bias are changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.fusion import fuse_conv_bn_weights

from djinn.hooks import Optimization, OptimizationContext
from djinn.planning import DataResidency, Node, OptimizationResult, Rewrite, Substitution, arguments

_NORMS = ("batch_norm", "native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm")


class FoldBatchNorms(Optimization):
    """Fold the scale and shift of a batch norm into the convolution before it, and remove the norm.

    The rewrite always saves one pass over the output. If weights or statistics change, the weights are folded again.
    """

    name = "fold_batch_norms"
    exact = False
    tolerates_growth = True  # it substitutes only the calls that it inspected, so plans for other sizes stay correct

    def wants(self, ops: frozenset[str]) -> bool:
        """Return True if the program has convolutions and batch norms."""
        return "aten::convolution" in ops and not ops.isdisjoint(f"aten::{norm}" for norm in _NORMS)

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Return a substitution for each convolution whose result only a batch norm in evaluation reads."""
        running = frozenset(context.plan.nodes)
        norms = [context.graph.nodes[n] for op in _NORMS for n in context.graph.by_op.get(op, ()) if n in running]
        substitutions = [s for norm in norms if (s := _fold(context, norm)) is not None]
        if not substitutions:
            return OptimizationResult(
                self.name, applied=False, reason="no batch norm is the only reader of a convolution"
            )
        reason = f"{len(substitutions)} batch norms become part of the convolutions before them"
        return OptimizationResult(
            self.name, applied=True, reason=reason, rewrite=Rewrite(substitutions=tuple(substitutions))
        )


def _fold(context: OptimizationContext, norm: Node) -> Substitution | None:
    graph = context.graph
    options = arguments(norm)
    convolution = graph.producer(options["input"])
    if convolution is None or convolution.operation != "convolution" or options.get("training"):
        return None
    if not _has_no_other_use(context, convolution, norm):
        return None
    convolution_options = arguments(convolution)
    statistics = [options[name] for name in ("running_mean", "running_var", "weight", "bias")]
    weights = [convolution_options["weight"], convolution_options["bias"]]
    operands = [v for v in (*weights, *statistics) if v is not None]
    if None in statistics[:2] or not all(_is_constant(context, v) for v in operands):
        return None
    return Substitution(
        nodes=frozenset({convolution.id, norm.id}),
        inputs=(convolution_options["input"], *operands),
        outputs=norm.outputs[:1],
        compute=_folded_convolution(convolution_options, options, [v is not None for v in (*weights, *statistics)]),
    )


def _has_no_other_use(context: OptimizationContext, convolution: Node, norm: Node) -> bool:
    """Return True if only the norm reads the convolution's result, and only the norm's first result is used."""
    graph, outputs = context.graph, (*convolution.outputs, *norm.outputs[1:])
    users = {user.id for value in outputs for user in graph.consumers(value)}
    return users <= {norm.id} and context.kept.isdisjoint(outputs) and not norm.writes


def _is_constant(context: OptimizationContext, value: int) -> bool:
    residency = context.profile.residency.get(value)
    return residency is DataResidency.PERSISTENT_WEIGHT and context.graph.producer(value) is None


def _folded_convolution(convolution_options: dict[str, Any], norm: dict[str, Any], present: Sequence[bool]) -> Any:
    geometry = [
        convolution_options[name]
        for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    ]

    def compute(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        optional_tensors = iter(tensors[1:])
        weight, bias, mean, variance, scale, shift = (
            next(optional_tensors) if is_present else None for is_present in present
        )
        assert weight is not None
        assert mean is not None
        assert variance is not None
        weights = fuse_conv_bn_weights(
            weight, bias, mean, variance, norm["eps"], scale, shift, convolution_options["transposed"]
        )
        return [torch.convolution(tensors[0], weights[0], weights[1], *geometry)]

    return compute
