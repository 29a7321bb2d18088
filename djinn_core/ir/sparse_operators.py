"""The ops that a program may contain with sparse COO tensors among their arguments.

They travel inside one op of Djinn's own, `SPARSE_CALL`: its first argument names the op, and a sparse tensor among the others is a
list that begins with `COO`, with its flag `is_coalesced`, its sizes, its indices and its values. A result takes `PLACES` values:
a header, and two tensors. The executor makes no sparse tensor that outlives the op.
"""

from __future__ import annotations

from typing import Final

COO: Final = "sparse_coo"
PLACES: Final = 3  # the header, the indices (or a strided result), the values
STRIDED_RESULT: Final = 0  # kinds of results, as the header says: [kind, is_coalesced, *sizes]
COO_RESULT: Final = 1
COO_WRITTEN: Final = 3  # of an op in place, which wrote into the memory of the values
NO_RESULT: Final = 2  # undefined, as a gradient that no input needs

# From strided tensors alone.
CONVERSIONS: Final = frozenset({"aten::_to_sparse", "aten::_to_sparse.sparse_dim"})

_UNARY = tuple(
    (
        "abs asin asinh atan atanh ceil erf erfinv expm1 floor frac log1p neg rad2deg deg2rad relu round sgn sign sin sinh sqrt tan "
        "tanh trunc"
    ).split()
)
_PREDICATES = ("isinf", "isnan", "isneginf", "isposinf", "signbit")

SPARSE_OPERATORS: Final = (
    CONVERSIONS
    | {f"aten::{name}{suffix}" for name in _UNARY for suffix in ("", "_")}
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
        "aten::_sparse_log_softmax",
        "aten::_sparse_log_softmax_backward_data",
        "aten::_sparse_mask_projection",
        "aten::_sparse_softmax",
        "aten::_sparse_softmax_backward_data",
        "aten::_sparse_sparse_matmul",
        "aten::_sparse_sum.dim",
        "aten::_sparse_sum_backward",
        "aten::_to_copy",
        "aten::_to_dense",
        "aten::addmm",
        "aten::any",
        "aten::bmm",
        "aten::cat",
        "aten::clone",
        "aten::copy_",
        "aten::div.Tensor_mode",
        "aten::empty_like",
        "aten::hspmm",
        "aten::index_select",
        "aten::mm",
        "aten::mv",
        "aten::narrow_copy",
        "aten::native_norm",
        "aten::native_norm.ScalarOpt_dim_dtype",
        "aten::norm.ScalarOpt_dim",
        "aten::norm.ScalarOpt_dim_dtype",
        "aten::permute",
        "aten::pow.Tensor_Scalar",
        "aten::smm",
        "aten::sparse_mask",
        "aten::sspaddmm",
        "aten::sum",
        "aten::sum.dim_IntList",
        "aten::threshold_backward",
        "aten::transpose.int",
        "aten::unsqueeze",
        "aten::zero_",
        "aten::zeros_like",
    }
)
