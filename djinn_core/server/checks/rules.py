"""The table of argument rules by op, and the wrapper that applies a rule before the op is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from djinn_core import torch_private
from djinn_core.ir.operators import split_name
from djinn_core.server.checks import indexing, lists, normalizing, numbers, pooling
from djinn_core.server.checks.arguments import Arguments, Rule

# By the name of the op without its overload.
RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "_adaptive_avg_pool2d_backward": pooling.pooled(2),
        "_adaptive_avg_pool3d_backward": pooling.pooled(3),
        "_batch_norm_no_update": normalizing.batch_norm_with_running_statistics,
        "_batch_norm_with_update": normalizing.batch_norm_with_running_statistics,
        "_cdist_backward": numbers.cdist_backward,
        "_cholesky_solve_helper": numbers.cholesky_solve,
        "_ctc_loss": indexing.ctc,
        "_ctc_loss_backward": indexing.ctc,
        "_embedding_bag": indexing.bag_forward,
        "_embedding_bag_backward": indexing.bag,
        "_embedding_bag_dense_backward": indexing.bag,
        "_embedding_bag_forward_only": indexing.bag_forward,
        "_embedding_bag_per_sample_weights_backward": indexing.bag,
        "_fft_c2c": numbers.fft,
        "_fft_c2r": numbers.fft,
        "_fft_r2c": numbers.fft,
        "_fused_adagrad": lists.fused_step,
        "_fused_adagrad_": lists.fused_step,
        "_fused_adam": lists.fused_step,
        "_fused_adam_": lists.fused_step,
        "_fused_adamw": lists.fused_step,
        "_fused_adamw_": lists.fused_step,
        "_fused_moving_avg_obs_fq_helper": numbers.fake_quantize,
        "_fused_sgd": lists.fused_step,
        "_fused_sgd_": lists.fused_step,
        "_log_softmax_backward_data": numbers.alike("grad_output", "output"),
        "_native_batch_norm_legit": normalizing.batch_norm,
        "_native_batch_norm_legit_functional": normalizing.batch_norm,
        "_native_batch_norm_legit_no_training": normalizing.batch_norm_with_running_statistics,
        "_new_zeros_with_same_feature_meta": numbers.zeros_like_feature,
        "_pdist_backward": numbers.pdist,
        "_pdist_forward": numbers.pdist,
        "_reshape_alias": numbers.reshape_alias,
        "_reshape_alias_copy": numbers.reshape_alias,
        "_segment_reduce_backward": indexing.segments,
        "_sobol_engine_draw": numbers.sobol,
        "_sobol_engine_ff_": numbers.sobol,
        "_sobol_engine_initialize_state_": numbers.sobol,
        "_sobol_engine_scramble_": numbers.sobol,
        "_softmax_backward_data": numbers.alike("grad_output", "output"),
        "_transform_bias_rescale_qkv": numbers.attention_projection,
        "_unsafe_masked_index": indexing.masked_index,
        "_unsafe_masked_index_put_accumulate": indexing.masked_index,
        "_upsample_bicubic2d_aa": numbers.antialiased,
        "_upsample_bicubic2d_aa_backward": numbers.antialiased,
        "_upsample_bilinear2d_aa": numbers.antialiased,
        "_upsample_bilinear2d_aa_backward": numbers.antialiased,
        "_weight_norm": normalizing.weight_norm,
        "_weight_norm_interface": normalizing.weight_norm_interface,
        "_weight_norm_interface_backward": normalizing.weight_norm_interface,
        "adaptive_avg_pool3d_backward": pooling.pooled(3),
        "adaptive_max_pool2d_backward": pooling.pooled(2),
        "adaptive_max_pool3d_backward": pooling.pooled(3),
        "avg_pool2d_backward": pooling.pooled(2),
        "avg_pool3d_backward": pooling.pooled(3),
        "batch_norm_backward": normalizing.batch_norm_backward,
        "batch_norm_update_stats": normalizing.batch_norm_statistics,
        "chunk": numbers.pieces,
        "dsplit": numbers.pieces,
        "embedding_backward": indexing.embedding_backward,
        "embedding_dense_backward": indexing.embedding_backward,
        "fractional_max_pool2d_backward": pooling.pooled(2),
        "fractional_max_pool3d_backward": pooling.pooled(3),
        "gcd": numbers.no_least,
        "gcd_": numbers.no_least,
        "gelu_backward": numbers.alike("grad_output", "self"),
        "grid_sampler_2d_backward": pooling.sampled(2),
        "grid_sampler_3d_backward": pooling.sampled(3),
        "gru": lists.recurrent(3, 1),
        "hsplit": numbers.pieces,
        "lcm": numbers.no_least,
        "lcm_": numbers.no_least,
        "linalg_matrix_power": numbers.power,
        "lstm": lists.recurrent(4, 2),
        "lu_unpack": indexing.lu_pivots,
        "matrix_power": numbers.power,
        "max_pool2d_with_indices_backward": pooling.pooled(2),
        "max_pool3d_with_indices_backward": pooling.pooled(3),
        "native_batch_norm": normalizing.batch_norm,
        "native_batch_norm_backward": normalizing.batch_norm_backward,
        "native_layer_norm_backward": normalizing.layer_norm_backward,
        "nll_loss2d_backward": indexing.negative_log_likelihood,
        "nll_loss_backward": indexing.negative_log_likelihood,
        "random": numbers.random_from,
        "random_": numbers.random_from,
        "reflection_pad1d_backward": pooling.padded(1, reflected=True),
        "reflection_pad2d_backward": pooling.padded(2, reflected=True),
        "reflection_pad3d_backward": pooling.padded(3, reflected=True),
        "replication_pad1d_backward": pooling.padded(1, reflected=False),
        "replication_pad2d_backward": pooling.padded(2, reflected=False),
        "replication_pad3d_backward": pooling.padded(3, reflected=False),
        "rnn_relu": lists.recurrent(1, 1),
        "rnn_tanh": lists.recurrent(1, 1),
        "roll": numbers.roll,
        "segment_reduce": indexing.segments,
        "smooth_l1_loss_backward": numbers.floating("grad_output", "self", "target"),
        "tensor_split": numbers.pieces,
        "unfold_backward": numbers.unfold_backward,
        "unsafe_chunk": numbers.pieces,
        "vsplit": numbers.pieces,
    }
    | {
        f"special_{kind}": numbers.degree
        for kind in (
            "chebyshev_polynomial_t",
            "chebyshev_polynomial_u",
            "chebyshev_polynomial_v",
            "chebyshev_polynomial_w",
            "hermite_polynomial_h",
            "hermite_polynomial_he",
            "laguerre_polynomial_l",
            "legendre_polynomial_p",
            "shifted_chebyshev_polynomial_t",
            "shifted_chebyshev_polynomial_u",
            "shifted_chebyshev_polynomial_v",
            "shifted_chebyshev_polynomial_w",
        )
    }
)


def checked(name: str, overload: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, which is called for the overload `name`, after a look at its arguments where it needs one."""
    rule = RULES.get(split_name(name)[0])
    if rule is None:
        return kernel
    arguments = torch_private.schema_of(overload).arguments
    names = tuple(a.name for a in arguments)
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def look_and_call(*positional: Any, **keywords: Any) -> Any:
        given = Arguments(name, defaults | dict(zip(names, positional, strict=False)) | keywords)
        try:
            rule(given)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise TypeError(f"{name} was called with arguments of other kinds than it takes: {error}") from error
        return kernel(*positional, **keywords)

    return look_and_call
