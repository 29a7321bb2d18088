"""Ops of attention: PyTorch's fused kernels and softmaxes."""

from __future__ import annotations

FUSED_ATTENTION = frozenset({
    "_scaled_dot_product_attention_math", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable",
    "scaled_dot_product_attention",
})  # fmt: skip
SOFTMAX = frozenset({"_safe_softmax", "_softmax", "softmax"})
