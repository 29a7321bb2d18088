"""Ops whose meta kernels accept dtypes that no kernel supports: the executor is asked before the first such call.

An error is then raised on the user's line. Supported dtypes depend on the device, so the client asks the executor, and
caches a positive reply. It is asked where the CPU of the client has no kernel, by a trial with a few elements (`small_trials.py`) of
pointwise ops and of those that are listed, and for ops of which only a list tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from djinn_client.interception.bounded_memo import keep
from djinn_client.interception.recording.recorder import current
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.shape_inference.inference_cache import inference_cache
from djinn_client.interception.shape_inference.shape_formulas import is_pointwise
from djinn_client.interception.shape_inference.small_trials import try_small
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
# Ops that compute no element from those in its place, or are not tagged as if they did, and whose kernels a few elements cannot harm.
_TRIED = frozenset(
    (
        "abs_.default gcd_.default ge_.Scalar ge_.Tensor gt_.Scalar gt_.Tensor heaviside_.default lcm_.default le_.Scalar le_.Tensor "
        "lt_.Scalar lt_.Tensor threshold_.default "
        "_cdist_forward.default _fused_dropout.default _prelu_kernel.default _softmax.default addbmm.default addmm.default "
        "addmv.default addr.default amax.default amin.default aminmax.default arange.start_step argmax.default argmin.default "
        "avg_pool1d.default avg_pool2d.default avg_pool3d.default baddbmm.default bernoulli.default bernoulli_.float bmm.default "
        "convolution.default count_nonzero.dim_IntList cummax.default cummin.default cumprod.default cumsum.default dot.default "
        "exponential_.default eye.m flip.default gather.default geometric_.default grid_sampler_2d.default huber_loss.default "
        "im2col.default index_add.default index_add_.default isin.Tensor_Tensor kaiser_window.beta kthvalue.default "
        "linalg_cross.default linalg_vector_norm.default linear.default linspace.default linspace.out logcumsumexp.default logspace.out "
        "logsumexp.default matmul.default max.default max.dim max_pool2d_with_indices.default max_pool3d_with_indices.default mean.default "
        "mean.dim median.default median.dim min.default min.dim mm.default mode.default mse_loss.default multinomial.default "
        "mv.default nanmedian.default nanmedian.dim nansum.default native_batch_norm.default native_dropout.default "
        "native_layer_norm.default nll_loss_forward.default normal_.default poisson.default prod.default prod.dim_int put.default "
        "rand_like.default randint_like.default randn.default randn_like.default random_.default random_.from random_.to "
        "randperm.default reflection_pad1d.default reflection_pad2d.default renorm.default rrelu_with_noise.default "
        "scatter_add.default scatter_add_.default scatter_reduce.two scatter_reduce_.two searchsorted.Tensor "
        "smooth_l1_loss.default sort.default sort.stable std.correction std_mean.correction sum.default sum.dim_IntList "
        "take.default topk.default trace.default tril.default tril_.default triu.default triu_.default uniform_.default "
        "var.correction var_mean.correction vdot.default"
    ).split()
)
# All kernels take them.
_USUAL = frozenset({torch.float32, torch.float64})
KEYS_LIMIT = 4096  # remembered results of the CPU's kernels
_WHOLE = frozenset("__and__ __or__ __xor__ bitwise_and bitwise_not bitwise_or bitwise_xor gcd lcm".split())


def may_lack_kernel(func: Any, operands: Sequence[TensorMeta], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if only the executor knows if it has a kernel of `func` for operands of these dtypes; the arguments are meta tensors."""
    if _kinds(func, args, kwargs) in inference_cache.supported:
        return False
    if not ((operands and is_unusual(func, operands[0].dtype)) or _cpu_lacks_kernel(func, operands, args, kwargs)):
        return False
    return port.is_open() or not current().captures  # a capture starts no server


def is_unusual(func: Any, dtype: torch.dtype) -> bool:
    """True if kernels of `func` for tensors of this dtype are rare, so that the executor's device may have none."""
    packet = func.name().removeprefix("aten::").partition(".")[0]
    plain = packet if packet.endswith("__") else packet.removesuffix("_")
    if plain in _FLOATING:
        return not dtype.is_floating_point
    return plain in _WHOLE and (dtype.is_floating_point or dtype.is_complex)


def _cpu_lacks_kernel(
    func: Any, operands: Sequence[TensorMeta], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """True if the CPU has no kernel of an op for these dtypes, and types of numbers."""
    dtypes = [o.dtype for o in operands] or [kwargs.get("dtype") or torch.get_default_dtype()]
    if not is_pointwise(func) and (str(func).removeprefix("aten.") not in _TRIED or _USUAL.issuperset(dtypes)):
        return False
    key = (*dtypes, *_kinds(func, args, kwargs))
    lacking = inference_cache.lacking.get(key)
    if lacking is not None:
        return lacking
    try:
        try_small(func, args, kwargs)
    except NotImplementedError:
        lacking = True
    except RuntimeError:  # of dtypes, or of a number
        return is_pointwise(func) or any(dtype.is_complex for dtype in dtypes)
    except Exception:
        return False
    else:
        lacking = False
    return keep(inference_cache.lacking, key, lacking, KEYS_LIMIT)


def note_taken(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The executor computed `func` with arguments of these dtypes."""
    inference_cache.supported.add(_kinds(func, args, kwargs))


def _kinds(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """An op with the dtypes and types of its arguments; a number in the shape of a CPU tensor is told from a tensor, as kernels do."""
    return (func, *(_kind(a) for a in (*args, *kwargs.values())))


def _kind(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return tuple(map(_kind, argument))
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.device.type == "cpu"
    return argument if type(argument) is torch.dtype else type(argument)
