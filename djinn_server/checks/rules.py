"""Table of argument rules by op, and the wrapper that applies a rule before the op.

The rules here are for layers. Backward passes of pooling, padding and sampling assume that gradients and indices fit the
input. Normalizations assume an element of statistics and weights for each channel or row. Fused optimizers and recurrent
layers assume lists of equal length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from djinn_core import torch_private
from djinn_core.ir.operators import split_name
from djinn_core.wire import limits
from djinn_core.wire.tensors import extent
from djinn_server.checks import indexing, numbers
from djinn_server.checks.arguments import Arguments, Rule, product


def pooled(n: int) -> Rule:
    """Return a rule for pooling over `n` dimensions: `grad_output` fits `self`, and indices are within its planes."""

    def rule(a: Arguments) -> None:
        _same_planes(a, n)
        for name in ("kernel_size", "output_size"):
            sizes = a.__getattr__(name)
            a.require(sizes is None or len(sizes) in {1, n}, f"{name} must have 1 or {n} elements")
        if a.indices is not None:
            a.require(tuple(a.indices.shape) == tuple(a.grad_output.shape), "indices need the shape of grad_output")
            a.within("indices", product(a.self.shape[-n:]))

    return rule


def _same_planes(a: Arguments, n: int) -> None:
    gradient, source = a.grad_output, a.self
    a.require(source.dim() in {n + 1, n + 2}, f"self must have {n + 1} or {n + 2} dimensions")
    a.require(0 not in source.shape[-n:], "self must not be empty")
    if gradient.dim() != source.dim() or gradient.shape[:-n] != source.shape[:-n]:
        a.refuse(f"grad_output of shape {tuple(gradient.shape)} does not belong to self of shape {tuple(source.shape)}")
    a.require(gradient.dtype == source.dtype, "grad_output and self must have one dtype")


def padded(n: int, reflected: bool) -> Rule:
    """Return a rule: `grad_output` fits `self`, padded in `n` dimensions. If `reflected`, padding is less than size."""

    def rule(a: Arguments) -> None:
        _same_planes(a, n)
        a.require(len(a.padding) == 2 * n, f"padding must have {2 * n} numbers")
        for i in range(n):
            size, before, after = a.self.shape[-1 - i], a.padding[2 * i], a.padding[2 * i + 1]
            a.require(a.grad_output.shape[-1 - i] == size + before + after, "grad_output needs the padded size")
            a.require(not reflected or max(before, after) < size, "padding must be less than the size of self")

    return rule


def sampled(n: int) -> Rule:
    """Return a rule: `grad_output` has the shape of `input`, of `n` spatial dimensions, sampled at `grid`."""

    def rule(a: Arguments) -> None:
        source, grid = a.input, a.grid
        a.require(source.dim() == grid.dim() == n + 2, f"input and grid must have {n + 2} dimensions")
        a.require(
            source.shape[0] == grid.shape[0] and grid.shape[-1] == n,
            f"grid needs input's batch, and {n} coordinates",
        )
        a.require(0 not in source.shape[1:], "input must not be empty")
        expected = (source.shape[0], source.shape[1], *grid.shape[1:-1])
        a.require(tuple(a.grad_output.shape) == expected, f"grad_output must have shape {expected}")
        a.require(source.dtype == grid.dtype == a.grad_output.dtype, "input, grid and grad_output must have one dtype")

    return rule


_LIKE_PARAMETERS = ("grads", "momentum_buffer_list", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_sums")


def fused_step(a: Arguments) -> None:
    """Check a fused optimizer step: gradients and states are dense and have the shape of their parameter."""
    required = {"grads", "exp_avgs", "exp_avg_sqs", "state_sums", "state_steps"}
    required |= {"max_exp_avg_sqs"} if a.amsgrad else set()
    required |= {"momentum_buffer_list"} if a.momentum else set()
    _check_dense(a, "self")
    for name in _LIKE_PARAMETERS:
        if name not in a:
            continue
        tensors = a.__getattr__(name)
        _check_length(a, name, required)
        _check_dense(a, name)
        for parameter, tensor in zip(a.self, tensors, strict=False):
            a.require(
                tensor.shape == parameter.shape and tensor.dtype == parameter.dtype,
                f"{name} must have the shapes and dtypes of self",
            )
    if "state_steps" in a:
        _check_length(a, "state_steps", required)
        a.require(
            all(t.numel() == 1 and t.is_floating_point() for t in a.state_steps),
            "state_steps must be float scalars",
        )
    for name in ("grad_scale", "found_inf", "lr"):
        tensor = a.__getattr__(name)
        if hasattr(tensor, "numel"):
            a.count(name, 1)
            a.require(tensor.is_floating_point(), f"{name} must be floating-point")


def _check_length(a: Arguments, name: str, required: set[str]) -> None:
    count = len(a.__getattr__(name))
    fits = count == len(a.self) or (count == 0 and name not in required)
    a.require(fits, f"{name} must be {len(a.self)} tensors, not {count}")


def _check_dense(a: Arguments, name: str) -> None:
    for tensor in a.__getattr__(name):
        has_all_memory = tensor.is_contiguous() or tensor.numel() <= extent(tensor.shape, tensor.stride())
        a.require(
            has_all_memory and tensor.is_floating_point(),
            f"{name} must be floating-point, and have memory for each element: expanded tensors are not supported",
        )


def recurrent(gates: int, states: int) -> Rule:
    """Return a rule: `params` has the tensors of all layers. `gates`: gates of a cell. `states`: tensors in `hx`."""

    def rule(a: Arguments) -> None:
        a.require(0 < a.num_layers <= limits.LAYERS, f"num_layers must be 1 to {limits.LAYERS}")
        count = (4 if a.has_biases else 2) * a.num_layers * (2 if a.bidirectional else 1)
        projected = count // (4 if a.has_biases else 2) + count if gates == 4 else count
        a.require(len(a.params) in {count, projected}, f"params must be {count} tensors, not {len(a.params)}")
        a.require(states == 1 or len(a.hx) == states, f"hx must be {states} tensors")

    return rule


_READ_OF_CHANNELS = ("weight", "bias", "running_mean", "running_var")
_OF_CHANNELS = (*_READ_OF_CHANNELS, "save_mean", "save_invstd", "save_var")


def batch_norm(a: Arguments) -> None:
    """Check that each statistic in use has an element for each channel of `input`."""
    _channels(a, required=not a.training, read=_READ_OF_CHANNELS)


def batch_norm_with_running_statistics(a: Arguments) -> None:
    """Check statistics as `batch_norm` does, for kernels that always use running statistics."""
    _channels(a, required=True)


def batch_norm_statistics(a: Arguments) -> None:
    """Check that updated statistics, if any, have an element for each channel."""
    _channels(a, required=False)


def _channels(a: Arguments, required: bool, read: tuple[str, ...] = _OF_CHANNELS) -> None:
    source = a.input
    a.require(source.dim() >= 2 and source.shape[1] > 0, "input must have channels")
    a.require(
        not required or (a.running_mean is not None and a.running_var is not None),
        "running_mean and running_var are missing",
    )
    channels, dtype = source.shape[1], source.dtype
    for name in read:
        a.count(name, channels)
    for name in _OF_CHANNELS:  # not their sizes: kernels resize tensors of `out=`
        a.computed_in(name, dtype)


def batch_norm_backward(a: Arguments) -> None:
    """Check that gradients have the shape of `input`, and that the statistics in use exist, one per channel."""
    source, gradient = a.input, a.grad_out
    a.require(source.dim() >= 2 and source.shape[1] > 0, "input must have channels")
    a.require(gradient.shape == source.shape, "grad_out must have the shape of input")
    is_training = a.train if a.train is not None else a.update
    saved_names = [name for name in ("save_mean", "save_invstd", "save_var") if name in a]
    used_names = saved_names if is_training else ("running_mean", "running_var")
    for name in used_names:
        a.require(a.__getattr__(name) is not None, f"{name} is missing")
        a.count(name, source.shape[1])
    for name in ("weight", "running_mean", "running_var", *saved_names):
        tensor = a.__getattr__(name)
        if tensor is not None and (name in {"weight", *used_names} or tensor.numel()):
            a.count(name, source.shape[1])
            a.computed_in(name, source.dtype)


def layer_norm_backward(a: Arguments) -> None:
    """Check that gradients have the shape of `input`, and that statistics have one element per row."""
    source, inner = a.input, tuple(a.normalized_shape)
    a.require(a.grad_out.shape == source.shape, "grad_out must have the shape of input")
    a.require(bool(inner) and tuple(source.shape[-len(inner) :]) == inner, "input must end with normalized_shape")
    rows = product(source.shape[: source.dim() - len(inner)])
    a.count("mean", rows)
    a.count("rstd", rows)
    for name in ("weight", "bias"):
        a.count(name, product(inner))
    for name in ("grad_out", "mean", "rstd", "weight", "bias"):
        a.computed_in(name, source.dtype)


def weight_norm(a: Arguments) -> None:
    """Check that `g` and the norms have an element for each slice of `v`."""
    v, g = (a.v, a.g) if a.v is not None else (a.saved_v, a.saved_g)
    dim = a.dim or 0
    a.require(
        v.dim() > 0 and v.numel() > 0 and dim in {0, v.dim() - 1},
        "v must not be empty, and dim must be its first or last",
    )
    expected = tuple(size if i == dim else 1 for i, size in enumerate(v.shape))
    a.require(tuple(g.shape) == expected and g.dtype == v.dtype, f"g must have shape {expected} and be {v.dtype}")
    a.count("saved_norms", v.shape[dim])
    for name in ("grad_w", "saved_norms"):
        a.computed_in(name, v.dtype)
    a.require(a.grad_w is None or a.grad_w.shape == v.shape, "grad_w must have the shape of v")


def weight_norm_interface(a: Arguments) -> None:
    """Check as `weight_norm` does, and that operands are contiguous, as these kernels assume."""
    weight_norm(a)
    for name in ("v", "g", "saved_v", "saved_g", "saved_norms", "grad_w"):
        tensor = a.__getattr__(name)
        a.require(tensor is None or tensor.is_contiguous(), f"{name} must be contiguous")


def attention_on_cpu(a: Arguments) -> None:
    """Check that the kernels do not divide by zero heads, queries or keys, and that batches and heads match."""
    for name, tensor in (("query", a.query), ("key", a.key)):
        if not tensor.numel():
            shape = tuple(tensor.shape)
            a.require(0 not in shape[1:-1], f"{name} must have heads and positions, but has shape {shape}")
    attention(a)
    shapes = tuple(tuple(tensor.shape) for tensor in (a.query, a.key, a.value))
    batches, heads = zip(*(shape[:2] for shape in shapes), strict=True)
    a.require(len(set(batches)) == 1, f"query, key and value must have one batch size, but have shapes {shapes}")
    grouped = heads[1] == heads[2] > 0 and heads[0] % heads[1] == 0
    a.require(grouped, f"key and value must have as many heads, and query a multiple of them, not shapes {shapes}")


def attention(a: Arguments) -> None:
    """Check that there are as many keys as values.

    PyTorch's kernel for CPUs reads as many keys as there are values. `replay.cpp` and `growing.cpp` check the same for
    `scaled_dot_product_attention`.
    """
    if min(a.key.dim(), a.value.dim()) > 1:
        keys, values = a.key.shape[-2], a.value.shape[-2]
        a.require(keys == values, f"key and value must have as many positions, not {keys} and {values}")


# Rules by op name without overload.
RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "_adaptive_avg_pool2d_backward": pooled(2),
        "_adaptive_avg_pool3d_backward": pooled(3),
        "_batch_norm_no_update": batch_norm_with_running_statistics,
        "_batch_norm_with_update": batch_norm_with_running_statistics,
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
        "_fused_adagrad": fused_step,
        "_fused_adagrad_": fused_step,
        "_fused_adam": fused_step,
        "_fused_adam_": fused_step,
        "_fused_adamw": fused_step,
        "_fused_adamw_": fused_step,
        "_fused_moving_avg_obs_fq_helper": numbers.fake_quantize,
        "_fused_sgd": fused_step,
        "_fused_sgd_": fused_step,
        "_log_softmax_backward_data": numbers.alike("grad_output", "output"),
        "_native_batch_norm_legit": batch_norm,
        "_native_batch_norm_legit_functional": batch_norm,
        "_native_batch_norm_legit_no_training": batch_norm_with_running_statistics,
        "_new_zeros_with_same_feature_meta": numbers.zeros_like_feature,
        "_pdist_backward": numbers.pdist,
        "_pdist_forward": numbers.pdist,
        "_reshape_alias": numbers.reshape_alias,
        "_reshape_alias_copy": numbers.reshape_alias,
        "_scaled_dot_product_flash_attention_for_cpu": attention_on_cpu,
        "_scaled_dot_product_flash_attention_for_cpu_backward": attention_on_cpu,
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
        "_weight_norm": weight_norm,
        "_weight_norm_interface": weight_norm_interface,
        "_weight_norm_interface_backward": weight_norm_interface,
        "adaptive_avg_pool3d_backward": pooled(3),
        "adaptive_max_pool2d_backward": pooled(2),
        "adaptive_max_pool3d_backward": pooled(3),
        "avg_pool2d_backward": pooled(2),
        "avg_pool3d_backward": pooled(3),
        "batch_norm_backward": batch_norm_backward,
        "batch_norm_update_stats": batch_norm_statistics,
        "chunk": numbers.piece_count,
        "dsplit": numbers.piece_count,
        "embedding_backward": indexing.embedding_backward,
        "embedding_dense_backward": indexing.embedding_backward,
        "fractional_max_pool2d_backward": pooled(2),
        "fractional_max_pool3d_backward": pooled(3),
        "gcd": numbers.no_smallest_integer,
        "gcd_": numbers.no_smallest_integer,
        "gelu_backward": numbers.alike("grad_output", "self"),
        "grid_sampler_2d_backward": sampled(2),
        "grid_sampler_3d_backward": sampled(3),
        "gru": recurrent(3, 1),
        "hsplit": numbers.piece_count,
        "lcm": numbers.no_smallest_integer,
        "lcm_": numbers.no_smallest_integer,
        "linalg_matrix_power": numbers.power,
        "lstm": recurrent(4, 2),
        "lu_unpack": indexing.lu_pivots,
        "matrix_power": numbers.power,
        "max_pool2d_with_indices_backward": pooled(2),
        "max_pool3d_with_indices_backward": pooled(3),
        "native_batch_norm": batch_norm,
        "native_batch_norm_backward": batch_norm_backward,
        "native_layer_norm_backward": layer_norm_backward,
        "nll_loss2d_backward": indexing.negative_log_likelihood,
        "nll_loss_backward": indexing.negative_log_likelihood,
        "random": numbers.random_from,
        "random_": numbers.random_from,
        "reflection_pad1d_backward": padded(1, reflected=True),
        "reflection_pad2d_backward": padded(2, reflected=True),
        "reflection_pad3d_backward": padded(3, reflected=True),
        "replication_pad1d_backward": padded(1, reflected=False),
        "replication_pad2d_backward": padded(2, reflected=False),
        "replication_pad3d_backward": padded(3, reflected=False),
        "rnn_relu": recurrent(1, 1),
        "rnn_tanh": recurrent(1, 1),
        "roll": numbers.roll,
        "scaled_dot_product_attention": attention,
        "segment_reduce": indexing.segments,
        "smooth_l1_loss_backward": numbers.floating("grad_output", "self", "target"),
        "tensor_split": numbers.piece_count,
        "unfold_backward": numbers.unfold_backward,
        "unsafe_chunk": numbers.piece_count,
        "vsplit": numbers.piece_count,
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
    """Return `kernel`, or if there is a rule for the op `name`, a function that applies the rule before the kernel."""
    rule = RULES.get(split_name(name)[0])
    if rule is None:
        return kernel
    arguments = torch_private.schema_of(overload).arguments
    names = tuple(a.name for a in arguments)
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def check_and_call(*positional: Any, **keywords: Any) -> Any:
        arguments = Arguments(name, defaults | dict(zip(names, positional, strict=False)) | keywords)
        try:
            rule(arguments)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise TypeError(f"{name} was called with arguments of wrong types: {error}") from error
        return kernel(*positional, **keywords)

    return check_and_call
