"""Ops whose meta kernels accept dtypes that no kernel supports: the executor is asked before the first such call.

An error is then raised on the user's line. Supported dtypes depend on the device, so the client asks the executor, and
caches a positive answer. Of pointwise ops, these are those that the CPU has no kernel of; others are listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from djinn_core.interception.bounded_memo import keep
from djinn_core.interception.recording.recorder import current
from djinn_core.interception.runtime_interface import port
from djinn_core.interception.shape_inference.inference_cache import inference_cache
from djinn_core.interception.shape_inference.shape_formulas import is_pointwise
from djinn_core.interception.shape_inference.small_trials import try_small
from djinn_core.ir.values import TensorMeta

aten = torch.ops.aten
_FLOATING = frozenset(
    (
        "_linalg_eigh _log_softmax _softmax elu frac gelu glu hardsigmoid hardswish histc log_sigmoid_forward mish multinomial "
        "nextafter silu softplus upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_trilinear3d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
    ).split()
)
_TRIED = frozenset({
    aten.amax.default,
    aten.amin.default,
    aten.aminmax.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.huber_loss.default,
    aten.max.default,
    aten.max.dim,
    aten.median.default,
    aten.min.default,
    aten.min.dim,
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.sort.default,
    aten.topk.default,
})  # fmt: skip
KEYS_LIMIT = 4096  # remembered answers of the CPU's kernels
_WHOLE = frozenset("__and__ __or__ __xor__ bitwise_and bitwise_not bitwise_or bitwise_xor gcd lcm".split())


def may_lack_kernel(func: Any, operands: Sequence[TensorMeta], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if only the executor knows if it has a kernel of `func` for operands of these dtypes; the arguments are meta tensors."""
    if not operands or (func, operands[0].dtype) in inference_cache.supported:
        return False
    if not (_is_unusual(func, operands[0].dtype) or _cpu_lacks_kernel(func, operands, args, kwargs)):
        return False
    return port.is_open() or not current().captures  # a capture starts no server


def _is_unusual(func: Any, dtype: torch.dtype) -> bool:
    packet = func.name().removeprefix("aten::").partition(".")[0]
    plain = packet if packet.endswith("__") else packet.removesuffix("_")
    if plain in _FLOATING:
        return not dtype.is_floating_point
    return plain in _WHOLE and (dtype.is_floating_point or dtype.is_complex)


def _cpu_lacks_kernel(
    func: Any, operands: Sequence[TensorMeta], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """True if the CPU has no kernel of an op for these dtypes, and types of numbers."""
    if not (is_pointwise(func) or func in _TRIED):
        return False
    key = (func, *[o.dtype for o in operands], *[getattr(a, "dtype", type(a)) for a in (*args, *kwargs.values())])
    lacking = inference_cache.lacking.get(key)
    if lacking is not None:
        return lacking
    try:
        try_small(func, args, kwargs)
    except NotImplementedError:
        lacking = True
    except RuntimeError:  # of dtypes, or of a number
        return is_pointwise(func)
    except Exception:
        return False
    else:
        lacking = False
    return keep(inference_cache.lacking, key, lacking, KEYS_LIMIT)


def note_taken(func: Any, operands: Sequence[torch.Tensor]) -> None:
    """The executor computed `func` with these operands."""
    if operands:
        inference_cache.supported.add((func, operands[0].dtype))
