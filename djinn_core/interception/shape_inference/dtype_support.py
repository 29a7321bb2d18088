"""Ops whose meta kernels accept dtypes that no kernel supports: the executor is asked before the first such call.

An error is then raised on the user's line. Supported dtypes depend on the device, so the client asks the executor, and
caches a positive answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from djinn_core.interception.recording.recorder import current
from djinn_core.interception.runtime_interface import port
from djinn_core.interception.shape_inference.inference_cache import inference_cache

_FLOATING = frozenset(
    (
        "_linalg_eigh _log_softmax _softmax elu frac gelu glu hardsigmoid hardswish histc log_sigmoid_forward mish multinomial "
        "nextafter silu softplus upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_trilinear3d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
    ).split()
)
_WHOLE = frozenset("__and__ __or__ __xor__ bitwise_and bitwise_not bitwise_or bitwise_xor gcd lcm".split())


def may_lack_kernel(func: Any, operands: Sequence[Any]) -> bool:
    """True if only the executor knows if it has a kernel of `func` for operands of these dtypes (one for each of `operands`)."""
    packet = func.name().removeprefix("aten::").partition(".")[0]
    plain = packet if packet.endswith("__") else packet.removesuffix("_")
    if not operands or not (plain in _FLOATING or plain in _WHOLE):
        return False
    dtype = operands[0].dtype
    usual = dtype.is_floating_point if plain in _FLOATING else not (dtype.is_floating_point or dtype.is_complex)
    if usual or (func, dtype) in inference_cache.supported:
        return False
    return port.is_open() or not current().captures  # a capture starts no server


def note_taken(func: Any, operands: Sequence[torch.Tensor]) -> None:
    """The executor computed `func` with these operands."""
    if operands:
        inference_cache.supported.add((func, operands[0].dtype))
