"""Warnings of kernels that follow from a call's metadata. Other kernel warnings stay in the executor's log.

The CPU kernel runs on few elements. PyTorch attributes its warning to the function that the user called, and so to the
user's line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from djinn_core.ir.program import Call
from djinn_core.ir.values import TensorMeta, contiguous_strides

aten = torch.ops.aten
_VARIANCES: Final = frozenset({
    aten.std.correction, aten.var.correction, aten.std_mean.correction, aten.var_mean.correction,
})  # fmt: skip
_SEARCHES: Final = {
    aten.searchsorted.Tensor: 1,
    aten.bucketize.Tensor: 0,
}  # positions of the searched values
_COPY, _CAST = aten.copy_.default, aten._to_copy.default
_CHOLESKY: Final = getattr(aten, "cholesky", None)  # PyTorch 2.14 lacks this op


def warn_as_kernel(func: Any, kwargs: Mapping[str, Any], call: Call) -> bool:
    """Warn as the CPU kernel does for a call with these metadata. Return True if each such call warns."""
    if func in _VARIANCES:
        return _warn_of_variance(func, kwargs, call)
    if func is _COPY or func is _CAST:
        return _warn_of_cast(call, target=call.operands[0] if func is _COPY else call.results[0])
    if func is aten.where.self and call.operands[0].dtype is torch.uint8:  # the meta kernel has warned already
        return torch.is_warn_always_enabled()
    if _CHOLESKY is not None and func is _CHOLESKY.default:
        return _warn_once(func, torch.eye(1))
    if func in _SEARCHES and len(call.operands) == 2 and not _is_contiguous(call.operands[_SEARCHES[func]]):
        operands = [torch.ones(2), torch.ones(2, 2).t()]
        return _warn_once(func, *(operands if _SEARCHES[func] else reversed(operands)))
    return False


def _warn_once(func: Any, *operands: torch.Tensor) -> bool:
    """Run a kernel whose warning PyTorch shows once. Return True if PyTorch is set to show it each time."""
    func(*operands)
    return torch.is_warn_always_enabled()


def _is_contiguous(meta: TensorMeta) -> bool:
    return meta.stride == contiguous_strides(meta.shape)


def _warn_of_variance(func: Any, kwargs: Mapping[str, Any], call: Call) -> bool:
    """Warn of a variance over too few elements. Return True if the call warns."""
    operand, result = call.operands[0], call.results[0]
    correction = kwargs.get("correction")
    correction = 1 if correction is None else correction
    elements = operand.numel // result.numel if result is not None and result.numel else 0
    if elements > correction:
        return False
    func(torch.ones(elements, dtype=operand.dtype), [0], correction=correction)
    return True


def _warn_of_cast(call: Call, target: Any) -> bool:
    """Warn of a cast from complex to real numbers. Return True if PyTorch is set to show this warning each time."""
    source = call.operands[-1]
    if target is None or not source.dtype.is_complex or target.dtype.is_complex:
        return False
    _CAST(torch.zeros((), dtype=source.dtype), dtype=target.dtype)
    return torch.is_warn_always_enabled()
