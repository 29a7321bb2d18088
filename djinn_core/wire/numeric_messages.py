"""Numeric settings of a client's PyTorch, which affect the choice of kernels and precisions, and so results."""

from typing import Annotated, Final, Literal

import msgspec

from djinn_core.wire.message_base import Message

Precision = Literal["none", "ieee", "tf32", "bf16"]
PRECISIONS: Final = (
    9  # of float32: in general; on CUDA and on mkldnn in general, of products, convolutions and recurrent layers
)


class NumericSettings(Message, frozen=True):
    """Settings for the submissions of a session until the next `NumericSettings`. The defaults are PyTorch's.

    Attributes without a description are switches of `torch.backends.cudnn`, `mkldnn` and `cuda.matmul`.

    Attributes:
        deterministic: as in `torch.use_deterministic_algorithms`.
        warn_only: as in `torch.use_deterministic_algorithms`.
        fill_uninitialized: `torch.utils.deterministic.fill_uninitialized_memory`.
        float32: the `PRECISIONS` precisions of float32 ops, which `torch.set_float32_matmul_precision`, `allow_tf32` and
            `fp32_precision` set.
        exact: Djinn's setting. If False, the executor may compute ops of several sessions together, whose results
            differ in rounding.
    """

    deterministic: bool = False
    warn_only: bool = False
    fill_uninitialized: bool = True
    float32: Annotated[tuple[Precision, ...], msgspec.Meta(min_length=PRECISIONS, max_length=PRECISIONS)] = (
        *("none",) * 3,
        *("tf32",) * 2,
        *("none",) * 4,
    )
    cudnn_enabled: bool = True
    cudnn_benchmark: bool = False
    cudnn_deterministic: bool = False
    mkldnn_enabled: bool = True
    mkldnn_deterministic: bool = False
    fp16_accumulation: bool = False
    fp16_reduction: tuple[bool, bool] = (True, True)
    bf16_reduction: tuple[bool, bool] = (True, True)
    exact: bool = True
