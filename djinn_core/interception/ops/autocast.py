"""`torch.autocast("remote_accelerator")`: the same ops in the same precision as on CUDA.

PyTorch's casting policies are in C++ and serve the devices that it knows; a device of Python kernels has the dispatch key alone. So
the policies are repeated here: the four lists of ops of `ATen/autocast_mode.h` for CUDA, and what each policy does to arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

import torch

from djinn_core import torch_private
from djinn_core.interception.device.device_state import DEVICE_NAME, device_state
from djinn_core.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.torch_private import never_compiled

# In the dtype of the autocast block: matrix products, convolutions, attention, recurrent cells.
LOWER_PRECISION: Final = (
    "_convolution.deprecated",
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention",
)

# In float32: what loses too much in less.
SINGLE_PRECISION: Final = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
)

# With a float32 result, unless the call names a dtype.
SINGLE_PRECISION_RESULT: Final = (
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
)

# The same, where the overload that takes a dtype is another one.
SINGLE_PRECISION_OVERLOAD: Final = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}

# In the widest dtype among the arguments.
WIDEST: Final = (
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
)

# Unsafe in less than float32.
BANNED: Final = ("binary_cross_entropy",)


Kernel = Callable[..., Any]
_REDUCED = (torch.float16, torch.bfloat16)


def is_cast(argument: Any) -> bool:
    """True if autocast applies to an argument: floating tensors on the device, other than float64."""
    return (
        isinstance(argument, torch.Tensor)
        and argument.is_floating_point()
        and argument.dtype is not torch.float64
        and (isinstance(argument, LazyTensor) or argument.device.type == DEVICE_NAME)  # transforms wrap tensors
    )


def cast(argument: Any, dtype: torch.dtype) -> Any:
    """`argument` with the tensors in it that autocast applies to converted to `dtype`."""
    if isinstance(argument, (list, tuple)):
        return [cast(a, dtype) for a in argument]
    if not is_cast(argument) or argument.dtype is dtype:
        return argument
    if not _keeps_cast(argument, dtype):
        return argument.to(dtype)
    key = (id(argument), dtype)
    found = device_state.casts.get(key)
    if found is None:
        found = device_state.casts[key] = (argument, argument.to(dtype))
    return found[1]


def _keeps_cast(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if the cast of `tensor` is worth caching: it is a parameter, and the cast can be differentiated."""
    return (
        tensor.requires_grad
        and tensor.is_leaf
        and tensor.dtype is torch.float32
        and dtype in _REDUCED
        and torch.is_grad_enabled()
        and torch.is_autocast_cache_enabled()
        and not torch_private.is_view(tensor)
        and not torch_private.in_transform()
    )


def forget_casts() -> None:
    """The outermost autocast block ended."""
    device_state.casts.clear()


def _cast_all(func: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*[cast(a, dtype) for a in args], **{name: cast(a, dtype) for name, a in kwargs.items()})


def _lower_precision(func: Any) -> Kernel:
    """Everything in the dtype of the autocast block."""
    return lambda args, kwargs: _cast_all(func, torch.get_autocast_dtype(DEVICE_NAME), args, kwargs)


def _single_precision(func: Any) -> Kernel:
    """Everything in float32."""
    return lambda args, kwargs: _cast_all(func, torch.float32, args, kwargs)


def _single_precision_result(func: Any) -> Kernel:
    """The arguments as they are; the result in float32 unless the call names a dtype."""

    def kernel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_cast(args[0]) and not _names_dtype(func, args, kwargs):
            kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)

    return kernel


def _names_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("dtype") is not None:
        return True
    names = [a.name for a in torch_private.schema_of(func).arguments]
    place = names.index("dtype")
    return place < len(args) and args[place] is not None


def _single_precision_overload(func: Any) -> Kernel:
    """As `_single_precision_result`, by an overload that takes a dtype."""

    def kernel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = torch.float32 if is_cast(args[0]) else args[0].dtype
        return func(*args, **kwargs, dtype=dtype)

    return kernel


def _widest(func: Any) -> Kernel:
    """Everything in the widest dtype among the arguments."""

    def kernel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _cast_all(func, _widest_dtype((*args, *kwargs.values())), args, kwargs)

    return kernel


def _widest_dtype(arguments: Iterable[Any]) -> torch.dtype:
    widest = torch.get_autocast_dtype(DEVICE_NAME)
    for tensor in _tensors(arguments):
        if tensor.dtype is torch.float32:
            widest = torch.float32
        elif widest is not torch.float32 and tensor.dtype is not widest:
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return widest


def _tensors(arguments: Iterable[Any]) -> Iterable[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from _tensors(argument)
        elif is_cast(argument):
            yield argument


def _banned(_func: Any) -> Kernel:
    return _refuse


def _refuse(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> NoReturn:
    raise RuntimeError(
        "binary_cross_entropy and BCELoss are unsafe to autocast: in half precision their logarithms overflow. Use "
        "binary_cross_entropy_with_logits or BCEWithLogitsLoss, without the sigmoid before it, which are safe"
    )


_POLICIES: tuple[tuple[Callable[[Any], Kernel], tuple[str, ...]], ...] = (
    (_lower_precision, LOWER_PRECISION),
    (_single_precision, SINGLE_PRECISION),
    (_single_precision_result, SINGLE_PRECISION_RESULT),
    (_widest, WIDEST),
    (_banned, BANNED),
)


def register() -> list[torch.library.Library]:
    """Register the policies; they stay as long as the returned objects live."""
    everything = torch.library.Library("_", "IMPL")
    torch_private.pass_through(everything, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    for policy, names in _POLICIES:
        for name in names:
            library.impl(name, _entered(policy, name), "AutocastPrivateUse1")
    for name, with_dtype in SINGLE_PRECISION_OVERLOAD.items():
        library.impl(name, _entered(_single_precision_overload, with_dtype), "AutocastPrivateUse1")
    torch_private.after_clearing_casts(forget_casts)
    return [everything, library]


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _entered(policy: Callable[[Any], Kernel], name: str) -> Kernel:
    """The policy for an overload as PyTorch calls it: ops inside it are not autocast once more.

    The object of an overload is looked up at the first call, because PyTorch takes long to make one.
    """
    found: Kernel | None = None

    @never_compiled
    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal found
        if found is None:
            found = policy(_overload(name))
        with torch_private.without_autocast():
            return found(args, kwargs)

    return kernel
