"""The ops that a program may contain with non-strided tensors among their arguments.

The client sends them inside Djinn's op `LAYOUT_CALL`. Its first argument names the op. A non-strided tensor becomes a
list: a word for its kind, then numbers and strided tensors:

    COO, is_coalesced, sizes, indices, values
    one of COMPRESSED, sizes, compressed indices, plain indices, values
    PER_TENSOR, the index of its dtype in QUANTIZED, scale, zero point, integers
    PER_CHANNEL, the index of its dtype in QUANTIZED, axis, integers, scales, zero points
    NESTED, dimensions of each tensor, all sizes concatenated, all elements concatenated
    NESTED_VIEW, dimensions of each tensor, all sizes, all strides, all offsets, the underlying memory

A result takes `VALUES_PER_RESULT` values: a header and up to three tensors. On the executor, no non-strided tensor outlives the
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

VALUES_PER_RESULT: Final = (
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


def _aten(*names: str) -> frozenset[str]:
    """Return the names of overloads in `aten`. Each argument is a string of several names, separated by spaces."""
    return frozenset(f"aten::{name}" for some in names for name in some.split())


# Ops that take only strided tensors.
CONVERSIONS: Final = _aten(
    "_to_sparse _to_sparse.sparse_dim _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr "
    "_validate_compressed_sparse_indices _validate_sparse_compressed_tensor_args quantize_per_channel "
    "quantize_per_tensor quantize_per_tensor.tensor_qparams quantize_per_tensor_dynamic "
)
_UNARY = (
    "abs asin asinh atan atanh ceil conj_physical erf erfinv expm1 floor frac log1p neg rad2deg deg2rad relu round sgn sign sin "
    "sinh sqrt tan tanh trunc"
)
_ARITHMETIC = [
    f"{name}{suffix}.{other}"
    for name in ("mul", "div", "add", "sub")
    for suffix in ("", "_")
    for other in ("Tensor", "Scalar")
]
_OF_SPARSE = _aten(
    _UNARY, *(f"{name}_" for name in _UNARY.split()), *_ARITHMETIC,
    "angle isinf isnan isneginf isposinf signbit",
    "_coalesce _sparse_addmm _sparse_csr_prod.dim_dtype _sparse_csr_sum.dim_dtype _sparse_log_softmax "
    "_sparse_log_softmax_backward_data _sparse_mask_projection _sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward "
    "_sparse_softmax _sparse_softmax_backward_data _sparse_sparse_matmul _sparse_sum.dim _sparse_sum_backward "
    "_to_copy _to_dense addmm addmm_ addmv any baddbmm bmm cat clone copy_ div.Tensor_mode div_.Tensor_mode "
    "empty_like fill_.Scalar floor_divide floor_divide_.Tensor hspmm index_select mm mv nan_to_num nan_to_num_ "
    "narrow_copy native_norm native_norm.ScalarOpt_dim_dtype norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype permute "
    "pow.Tensor_Scalar select.int select_copy.int smm sparse_mask sparse_sampled_addmm sspaddmm sum sum.dim_IntList "
    "threshold_backward transpose.int triangular_solve unsqueeze zero_ zeros_like ",
)  # fmt: skip
_OF_QUANTIZED = _aten(
    "_adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_nearest_exact2d avg_pool2d avg_pool3d cat channel_shuffle "
    "clamp copy_ dequantize.self eq.Scalar eq.Tensor equal fill_.Scalar ge.Scalar ge.Tensor gelu gt.Scalar gt.Tensor "
    "hardsigmoid hardtanh le.Scalar le.Tensor leaky_relu lt.Scalar lt.Tensor max max.dim mean mean.dim min min.dim "
    "ne.Scalar ne.Tensor quantized_max_pool1d quantized_max_pool2d reflection_pad1d relu relu_ sigmoid sort "
    "sort.stable std.correction tanh topk upsample_bilinear2d upsample_nearest2d upsample_nearest3d zero_ "
)
_OF_NESTED = _aten(
    "_nested_from_padded_and_nested_example _nested_select_backward _nested_sum_backward "
    "_nested_tensor_softmax_with_shape _safe_softmax _softmax _softmax_backward_data _transform_bias_rescale_qkv "
    "add.Tensor add_.Tensor all.dim bmm cat clone div.Tensor embedding eq.Tensor linear linear_backward "
    "masked_fill.Scalar matmul matmul_backward mul.Tensor mul_.Tensor narrow native_layer_norm "
    "native_layer_norm_backward select.int squeeze squeeze.dim squeeze.dims sub.Tensor sum.dim_IntList "
    "to_padded_tensor transpose.int unsqueeze view where.self "
)

# The ops that accept each kind of tensor.
OPERATORS_OF: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        **dict.fromkeys((COO, *COMPRESSED), CONVERSIONS | _OF_SPARSE),
        **dict.fromkeys((PER_TENSOR, PER_CHANNEL), _OF_QUANTIZED),
        **dict.fromkeys((NESTED, NESTED_VIEW), _OF_NESTED),
    }
)
LAYOUT_OPERATORS: Final = CONVERSIONS.union(*OPERATORS_OF.values())
