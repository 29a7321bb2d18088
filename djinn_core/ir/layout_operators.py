"""The ops that a program may contain with non-strided tensors among their arguments.

They are sent inside Djinn's op `LAYOUT_CALL`. Its first argument names the op. A non-strided tensor becomes a list: a
word for its kind, then numbers and strided tensors:

    COO, is_coalesced, sizes, indices, values
    one of COMPRESSED, sizes, compressed indices, plain indices, values
    PER_TENSOR, its dtype's place in QUANTIZED, scale, zero point, integers
    PER_CHANNEL, its dtype's place in QUANTIZED, axis, integers, scales, zero points
    NESTED, dimensions of each tensor, all sizes concatenated, all elements concatenated
    NESTED_VIEW, dimensions of each tensor, all sizes, all strides, all offsets, the underlying memory

A result takes `PLACES` values: a header and up to three tensors. On the executor, no non-strided tensor outlives the
op.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

COO: Final = "sparse_coo"
COMPRESSED: Final = ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
PER_TENSOR: Final = "quantized_per_tensor"
PER_CHANNEL: Final = "quantized_per_channel"
NESTED: Final = "nested"
NESTED_VIEW: Final = "nested_view"
QUANTIZED: Final = (("qint8", "int8"), ("quint8", "uint8"), ("qint32", "int32"))  # and the element types

PLACES: Final = (
    4  # number of values of a result: the header and tensors in the order above; a strided result is the first tensor
)

# Kinds of results: the first number of a header.
STRIDED_RESULT: Final = 0
COO_RESULT: Final = 1  # [kind, in place, is_coalesced, *sizes]
NO_RESULT: Final = 2  # undefined, such as an unneeded gradient
COMPRESSED_RESULT: Final = 3  # [kind, in place, place in COMPRESSED, *sizes]
PER_TENSOR_RESULT: Final = 4  # [kind, in place, place in QUANTIZED, zero point, bits of the scale]
PER_CHANNEL_RESULT: Final = 5  # [kind, in place, place in QUANTIZED, axis]
NESTED_RESULT: Final = 6  # [kind, in place, dimensions of each tensor, *sizes of all]
NESTED_VIEW_RESULT: Final = 7  # [kind, in place, dimensions of each tensor, how many, *sizes, *strides, *offsets]

# Ops that take only strided tensors.
CONVERSIONS: Final = frozenset({
    "aten::_to_sparse",
    "aten::_to_sparse.sparse_dim",
    "aten::_to_sparse_bsc",
    "aten::_to_sparse_bsr",
    "aten::_to_sparse_csc",
    "aten::_to_sparse_csr",
    "aten::_validate_compressed_sparse_indices",
    "aten::_validate_sparse_compressed_tensor_args",
    "aten::quantize_per_channel",
    "aten::quantize_per_tensor",
    "aten::quantize_per_tensor.tensor_qparams",
    "aten::quantize_per_tensor_dynamic",
})  # fmt: skip

_UNARY = tuple(
    (
        "abs angle asin asinh atan atanh ceil conj_physical erf erfinv expm1 floor frac log1p neg rad2deg deg2rad relu round sgn "
        "sign sin sinh sqrt tan tanh trunc"
    ).split()
)
_PREDICATES = ("isinf", "isnan", "isneginf", "isposinf", "signbit")

_OF_SPARSE = (
    {f"aten::{name}{suffix}" for name in _UNARY for suffix in ("", "_") if (name, suffix) != ("angle", "_")}
    | {f"aten::{name}" for name in _PREDICATES}
    | {
        f"aten::{name}{suffix}.{overload}"
        for name in ("mul", "div", "add", "sub")
        for suffix in ("", "_")
        for overload in ("Tensor", "Scalar")
    }
    | {
        "aten::_coalesce",
        "aten::_sparse_addmm",
        "aten::_sparse_csr_prod.dim_dtype",
        "aten::_sparse_csr_sum.dim_dtype",
        "aten::_sparse_log_softmax",
        "aten::_sparse_log_softmax_backward_data",
        "aten::_sparse_mask_projection",
        "aten::_sparse_mm_reduce_impl",
        "aten::_sparse_mm_reduce_impl_backward",
        "aten::_sparse_softmax",
        "aten::_sparse_softmax_backward_data",
        "aten::_sparse_sparse_matmul",
        "aten::_sparse_sum.dim",
        "aten::_sparse_sum_backward",
        "aten::_to_copy",
        "aten::_to_dense",
        "aten::addmm",
        "aten::addmm_",
        "aten::addmv",
        "aten::any",
        "aten::baddbmm",
        "aten::bmm",
        "aten::cat",
        "aten::clone",
        "aten::copy_",
        "aten::div.Tensor_mode",
        "aten::div_.Tensor_mode",
        "aten::empty_like",
        "aten::fill_.Scalar",
        "aten::floor_divide",
        "aten::floor_divide_.Tensor",
        "aten::hspmm",
        "aten::index_select",
        "aten::mm",
        "aten::mv",
        "aten::nan_to_num",
        "aten::nan_to_num_",
        "aten::narrow_copy",
        "aten::native_norm",
        "aten::native_norm.ScalarOpt_dim_dtype",
        "aten::norm.ScalarOpt_dim",
        "aten::norm.ScalarOpt_dim_dtype",
        "aten::permute",
        "aten::pow.Tensor_Scalar",
        "aten::select.int",
        "aten::select_copy.int",
        "aten::smm",
        "aten::sparse_mask",
        "aten::sparse_sampled_addmm",
        "aten::sspaddmm",
        "aten::sum",
        "aten::sum.dim_IntList",
        "aten::threshold_backward",
        "aten::transpose.int",
        "aten::triangular_solve",
        "aten::unsqueeze",
        "aten::zero_",
        "aten::zeros_like",
    }
)

_OF_QUANTIZED = {
    "aten::cat",
    "aten::copy_",
    "aten::fill_.Scalar",
    "aten::relu",
    "aten::relu_",
    "aten::tanh",
    "aten::zero_",
    "aten::_adaptive_avg_pool2d",
    "aten::_adaptive_avg_pool3d",
    "aten::_upsample_nearest_exact2d",
    "aten::avg_pool2d",
    "aten::avg_pool3d",
    "aten::channel_shuffle",
    "aten::clamp",
    "aten::dequantize.self",
    "aten::eq.Scalar",
    "aten::eq.Tensor",
    "aten::equal",
    "aten::ge.Scalar",
    "aten::ge.Tensor",
    "aten::gelu",
    "aten::gt.Scalar",
    "aten::gt.Tensor",
    "aten::hardsigmoid",
    "aten::hardtanh",
    "aten::le.Scalar",
    "aten::le.Tensor",
    "aten::leaky_relu",
    "aten::lt.Scalar",
    "aten::lt.Tensor",
    "aten::max",
    "aten::max.dim",
    "aten::mean",
    "aten::mean.dim",
    "aten::min",
    "aten::min.dim",
    "aten::ne.Scalar",
    "aten::ne.Tensor",
    "aten::quantized_max_pool1d",
    "aten::quantized_max_pool2d",
    "aten::reflection_pad1d",
    "aten::sigmoid",
    "aten::sort",
    "aten::sort.stable",
    "aten::std.correction",
    "aten::topk",
    "aten::upsample_bilinear2d",
    "aten::upsample_nearest2d",
    "aten::upsample_nearest3d",
}

_OF_NESTED = {
    f"aten::{name}"
    for name in (
        "_nested_from_padded_and_nested_example _nested_select_backward _nested_sum_backward _nested_tensor_softmax_with_shape "
        "_safe_softmax _softmax _softmax_backward_data _transform_bias_rescale_qkv add.Tensor add_.Tensor all.dim bmm cat "
        "clone div.Tensor embedding eq.Tensor linear linear_backward masked_fill.Scalar matmul matmul_backward mul.Tensor "
        "mul_.Tensor narrow native_layer_norm native_layer_norm_backward select.int squeeze squeeze.dim squeeze.dims "
        "sub.Tensor sum.dim_IntList to_padded_tensor transpose.int unsqueeze view where.self"
    ).split()
}

# The ops that accept each kind of tensor.
OPERATORS_OF: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        **dict.fromkeys((COO, *COMPRESSED), CONVERSIONS | _OF_SPARSE),
        **dict.fromkeys((PER_TENSOR, PER_CHANNEL), frozenset(_OF_QUANTIZED)),
        **dict.fromkeys((NESTED, NESTED_VIEW), frozenset(_OF_NESTED)),
    }
)
LAYOUT_OPERATORS: Final = CONVERSIONS.union(*OPERATORS_OF.values())
