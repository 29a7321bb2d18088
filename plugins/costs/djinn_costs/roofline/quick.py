"""Names of the most informative fifth of the probes, for measurements in the background.

An op that none of these probes measures gets the time of its kind.
"""

from __future__ import annotations

from typing import Final

_SIZED: Final = (
    "add", "mul", "relu", "gelu", "silu", "tanh", "exp", "add_", "addcdiv_", "lerp_", "gelu_backward", "threshold_backward",
    "sum", "mean outer", "native_layer_norm", "native_layer_norm_backward", "native_batch_norm", "native_batch_norm training",
    "native_batch_norm_backward", "_softmax", "_log_softmax", "clone", "clone heads", "cat", "copy_", "embedding",
)  # fmt: skip
_SIZES: Final = (1 << 12, 1 << 20)
_OTHERS: Final = (
    "view 4096", "transpose 4096", "split 4096", "max_pool2d_with_indices 4096", "max_pool2d_with_indices 1048576",
    "_adaptive_avg_pool2d 4096", "_adaptive_avg_pool2d 1048576",
    "product 1 1 128 128", "product 1 1 1024 1024", "product 1 8 128 1024", "product 1 64 16 128", "product 1 64 128 128",
    "product 1 64 1024 128", "product 1 512 128 128", "product 1 512 1024 1024", "product 8 16 128 64", "product 64 128 128 64",
    "convolution 1 7 64 64 1", "convolution 1 28 64 64 1", "convolution 1 28 16 16 1", "convolution 1 28 64 256 1",
    "convolution 7 128 128 3", "convolution 28 16 16 3", "convolution 28 64 64 3", "convolution 56 3 32 7",
    "convolution_backward 1 7 64 64 1", "convolution_backward 1 28 64 64 1",
    "convolution_backward 7 16 16 3", "convolution_backward 7 64 64 3", "convolution_backward 14 16 128 3",
    "convolution_backward 28 16 16 3", "convolution_backward 28 64 64 3", "convolution_backward 28 128 16 3",
    "convolution_backward 32 3 16 3",
    "grouped 14 32 3", "grouped 56 128 3",
    "attention 4 16 16 64", "attention 12 64 64 64", "attention 8 256 256 64", "attention 12 1 256 64",
    "attention_backward 4 16 16 64", "attention_backward 8 256 256 64",
    "recurrent 4 16 32", "recurrent 16 16 128",
    "sweep 1048576", "sweep 4194304", "sweep 16777216", "sweep 67108864",
    "mixed block", "mixed cell",
)  # fmt: skip
QUICK: Final = frozenset({f"{name} {size}" for name in _SIZED for size in _SIZES} | {*_OTHERS})
