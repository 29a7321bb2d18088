"""Families of ops, listed by op name."""

from __future__ import annotations

from typing import TYPE_CHECKING

# Only names: importing this module needs no graph.
if TYPE_CHECKING:
    from djinn_core.ir.graph import Graph, Node
    from djinn_core.ir.program import Call

CONVOLUTION = frozenset({
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_depthwise3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "convolution", "convolution_overrideable", "cudnn_convolution", "cudnn_convolution_transpose",
    "mkldnn_convolution", "slow_conv3d", "slow_conv_transpose2d", "thnn_conv2d",
})  # fmt: skip
MATRIX_PRODUCT = frozenset({"addbmm", "addmm", "addmv", "baddbmm", "bmm", "linear", "matmul", "mm", "mv"})
EMBEDDING = frozenset({"_embedding_bag", "_embedding_bag_forward_only", "embedding", "embedding_bag"})
FUSED_ATTENTION = frozenset({
    "_scaled_dot_product_attention_math", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable",
    "scaled_dot_product_attention",
})  # fmt: skip
SOFTMAX = frozenset({"_safe_softmax", "_softmax", "softmax"})
NORMALISATION = frozenset({
    "_batch_norm_impl_index", "_batch_norm_with_update", "_fused_rms_norm", "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training", "batch_norm", "cudnn_batch_norm", "group_norm", "instance_norm",
    "layer_norm", "native_batch_norm", "native_group_norm", "native_layer_norm", "rms_norm",
})  # fmt: skip
ACTIVATION = frozenset({
    "elu", "gelu", "hardswish", "hardtanh", "leaky_relu", "mish", "relu", "relu_", "relu6", "sigmoid", "silu", "silu_",
    "softplus", "tanh",
})  # fmt: skip
POOLING = frozenset({
    "_adaptive_avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool1d",
    "avg_pool2d", "max_pool1d", "max_pool2d", "max_pool2d_with_indices",
})  # fmt: skip
LOSS = frozenset({
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy_loss", "l1_loss", "mse_loss", "nll_loss",
    "nll_loss2d_forward", "nll_loss_forward", "nll_loss_nd", "smooth_l1_loss",
})  # fmt: skip
OPTIMIZER = frozenset({
    "_foreach_addcdiv_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "addcdiv_",
})  # fmt: skip

_ROLES = {
    "convolution": CONVOLUTION,
    "projection": MATRIX_PRODUCT,
    "embedding": EMBEDDING,
    "normalisation": NORMALISATION,
    "activation": ACTIVATION,
    "pooling": POOLING,
    "loss": LOSS,
    "optimizer": OPTIMIZER,
}
_ROLE_OF = {operation: role for role, operations in _ROLES.items() for operation in operations}
# The program itself may create the model, as `to_empty` does.
MADE = frozenset({"empty", "empty_strided", "ones", "rand", "randn", "zeros"})
_WEIGHT_NAMES = ("weight", "bias", "running_mean", "running_var")
_PRODUCT_WEIGHTS = {
    "mm": ("mat2",),
    "addmm": ("mat2", "self"),
    "matmul": ("other",),
    "addmv": ("self", "mat"),
    "mv": ("self",),
}


def role_of(node: Node) -> str | None:
    """Return the role of an op in a model, such as `backward` or `view`; None if the op has no listed role."""
    from djinn_core.ir.flow import is_view

    if is_backward(node):
        return "backward"
    if is_view(node):
        return "view"
    return _ROLE_OF.get(node.operation)


def is_backward(node: Node) -> bool:
    """Return True if autograd issued the op: the name of every backward op contains `_backward`."""
    return "_backward" in node.operation


def weights_of(graph: Graph, node: Node) -> list[int]:
    """Return the values at the parameter positions of this op: graph inputs, or buffers that the graph fills."""
    from djinn_core.ir.arguments import arguments
    from djinn_core.ir.flow import origin

    if node.operation in CONVOLUTION | EMBEDDING | NORMALISATION | {"linear"}:
        names: tuple[str, ...] = _WEIGHT_NAMES
    else:
        names = _PRODUCT_WEIGHTS.get(node.operation, ())
    if not names:
        return []
    options = arguments(node)
    candidates = [options[n] for n in names if isinstance(options.get(n), int) and options[n] in node.inputs]
    origins = [origin(graph, v) for v in candidates]
    return [v for v in origins if (maker := graph.producer(v)) is None or maker.operation in MADE]


def weights_in(call: Call) -> range:
    """Return the positions of operands that are always weights. Their sizes distinguish models of one architecture."""
    name, operands = call.op.removeprefix("aten::").partition(".")[0], call.operands
    if name in CONVOLUTION | NORMALISATION | {"linear"}:  # the first operand is data
        return range(1, len(operands))
    if name in EMBEDDING:
        return range(1)
    if name == "matmul" and len(operands[0].shape) > len(operands[-1].shape) == 2:
        return range(1, 2)
    return range(0)
