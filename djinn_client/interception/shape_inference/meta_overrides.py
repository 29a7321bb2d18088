"""Overrides for ops whose meta kernel is missing or differs from the kernels that compute.

Each rule gets meta tensors, and returns the result of `func` as meta tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.ops.custom_operators import is_data_dependent, metadata_of
from djinn_core.ir.operators import is_custom, split_name
from djinn_core.ir.values import TensorMeta

aten = torch.ops.aten
Rule = Callable[..., Any]


def _batch_norm(func: Any) -> Rule:
    """Return a rule whose saved statistics are empty in evaluation mode, as those of kernels are."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        out, mean, rstd = func(*args, **kwargs)
        training = kwargs.get("training", args[5] if len(args) > 5 else True)
        return (out, mean, rstd) if training else (out, mean.new_empty(0), rstd.new_empty(0))

    return rule


def _batch_norm_in_evaluation(func: Any) -> Rule:
    """Return a rule whose saved statistics (results 1 and 2) are empty, for ops that exist in evaluation mode only."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        out, mean, rstd, *rest = func(*args, **kwargs)
        return out, mean.new_empty(0), rstd.new_empty(0), *rest

    return rule


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a result with the strides of the query, as fused kernels do.

    Return the meta kernel's result if rows have gaps, because the unfused kernel runs then.
    """
    out: torch.Tensor = aten.scaled_dot_product_attention.default(query, key, value, *args, **kwargs)
    if out.dim() != 4 or out.shape != query.shape or any(t.stride(-1) != 1 for t in (query, key, value)):
        return out
    return torch.empty_like(query)


def _index(source: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the result of the meta kernel. Raise `NotImplementedError` for a mask, whose result has an unknown size."""
    if any(i is not None and i.dtype in {torch.bool, torch.uint8} for i in indices):
        raise NotImplementedError("the number of elements that a mask selects depends on data")
    indexed: torch.Tensor = aten.index.Tensor(source, indices)
    return indexed


def _index_put(func: Any) -> Rule:
    """Return a rule that refuses values that cannot be written. The meta kernel accepts them."""

    def rule(
        target: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if target.dtype != values.dtype:
            raise RuntimeError("Index put requires the source and destination dtypes match")
        if not any(i is not None and i.dtype in {torch.bool, torch.uint8} for i in indices):
            values.expand(aten.index.Tensor(target, indices).shape)
        return func(target, indices, values, *args, **kwargs)

    return rule


def _window(length: int, *_: Any, **options: Any) -> torch.Tensor:
    return torch.empty(length, **options)


def _repeat_interleave(repeats: torch.Tensor, output_size: int | None = None) -> torch.Tensor:
    if output_size is None:
        raise NotImplementedError("the sum of the repeats depends on data")
    return repeats.new_empty(output_size, dtype=torch.int64)


def _native_dropout(operand: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a new tensor if nothing is dropped, as kernels do. The meta kernel returns the operand."""
    out, mask = aten.native_dropout.default(operand, *args, **kwargs)
    return (out.clone() if out is operand else out), mask


def _convolution(operand: torch.Tensor, weight: torch.Tensor, bias: Any, *args: Any) -> torch.Tensor:
    """Return a result that keeps channels-last layout. The meta kernel keeps it only for CUDA."""
    out: torch.Tensor = aten.convolution.default(operand, weight, bias, *args)
    return _of_convolution(out, operand, weight, *args)


def _convolution_backward(upstream: torch.Tensor, operand: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
    _, *rest, _ = args
    *gradients, bias = aten.convolution_backward.default(upstream, operand, weight, *args)
    laid_out = [None if g is None else _of_convolution(g, operand, weight, *rest) for g in gradients]
    return (*(gradients if operand.dim() == 4 else laid_out), bias)


def _of_convolution(
    out: torch.Tensor, operand: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], *rest: Any
) -> torch.Tensor:
    """Return the result laid out as kernels do: channels last if the input or the weight is channels last."""
    if out.dim() == 3:  # kernels treat the input as images of height 1, and make it row-major first
        return _channels_last(out.unsqueeze(2), weight.unsqueeze(2)).squeeze(2)
    _, _, transposed, output_padding, groups = rest
    padded = transposed and any(padding >= step for padding, step in zip(output_padding, stride, strict=False))
    if out.dim() == 5 and (
        not _are_channels_last(operand, weight) or padded or not _is_of_onednn(operand, weight, groups)
    ):
        return out.contiguous()
    return _channels_last(out, operand, weight)


def _is_of_onednn(operand: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Return True if oneDNN computes a 3-D convolution on a CPU (`use_mkldnn` in ATen's Convolution.cpp).

    Raise `NotImplementedError` if only the executor knows. PyTorch's own kernel is row-major.
    """
    if operand.dtype is not torch.float32:
        return operand.dtype is not torch.float64
    if max(weight.shape[-2:]) == 1:
        raise NotImplementedError("the result's layout depends on the executor's number of threads")
    return groups > 1 or min(weight.shape[-2:]) > 3 or operand.shape[0] > 1 or math.prod(operand.shape[:4]) > 20480


_CHANNELS_LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}


def _channels_last(out: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
    """Return `out` in channels-last layout if one of `tensors` has this layout."""
    memory_format = _CHANNELS_LAST.get(out.dim())
    return out.contiguous(memory_format=memory_format) if memory_format and _are_channels_last(*tensors) else out


def _are_channels_last(*tensors: torch.Tensor) -> bool:
    return any(torch_dispatch.suggested_format(t) is _CHANNELS_LAST.get(t.dim(), "") for t in tensors)


def _as_images(rule: Rule, position: int = 0) -> Rule:
    """Return a rule whose first result is channels last if the argument at `position` is, otherwise row-major, as in kernels."""

    def laid_out(*args: Any, **kwargs: Any) -> Any:
        out = rule(*args, **kwargs)
        layout = torch_dispatch.suggested_format(args[position])
        if isinstance(out, torch.Tensor):
            return torch.empty_like(out, memory_format=layout)
        first, *rest = out
        return (None if first is None else torch.empty_like(first, memory_format=layout), *rest)

    return laid_out


def _row_major(func: Any) -> Rule:
    """Return a rule with row-major results, as in kernels. The meta kernel follows the input."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            return out.contiguous()
        return tuple(None if result is None else result.contiguous() for result in out)

    return rule


def _as_copy(func: Any) -> Rule:
    """Return a rule whose result has the strides of the first argument, because the kernels copy it."""

    def rule(operand: torch.Tensor, *args: Any) -> torch.Tensor:
        out: torch.Tensor = func(operand, *args)
        return torch.empty_like(operand, dtype=out.dtype)

    return rule


def _pointwise(func: Any) -> Rule:
    """Return a rule whose result has the strides of a sum of the operands, as in kernels."""

    def rule(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = func(*args, **kwargs)
        tensors = [a for a in args if isinstance(a, torch.Tensor) and a.is_meta]
        wide = [torch.empty_strided(t.shape, t.stride(), dtype=torch.float32, device="meta") for t in tensors]
        total = wide[0] + wide[1] if len(wide) > 1 else wide[0] + 1
        # A loss may be reduced to a number.
        return out.new_empty_strided(out.shape, total.stride()) if out.shape == total.shape else out

    return rule


def _into_elements(func: Any) -> Rule:
    """Return a rule that resizes `out` only if its number of elements differs, as the kernel does."""

    def rule(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        result = func(*args, out=torch.empty(0, dtype=out.dtype, device="meta"), **kwargs)
        if result.numel() != out.numel():
            func(*args, out=out, **kwargs)
        return out

    return rule


def _channel_shuffle(operand: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the result for any strides. The meta kernel refuses tensors that are not row-major."""
    shuffled: torch.Tensor = aten.native_channel_shuffle.default(operand.contiguous(), groups)
    return shuffled


def _batch_norm_backward(func: Any) -> Rule:
    """Return a rule that returns an input gradient only on request, as kernels do.

    The meta kernel always returns it.
    """

    def rule(*args: Any) -> Any:
        gradient, *rest = func(*args)
        mask = next(a for a in args if isinstance(a, (list, tuple)))
        return (gradient if mask[0] else None, *rest)

    return rule


def _multi_head_attention(*args: Any) -> Any:
    """Return the result with weights only on request, as kernels do.

    The meta kernel returns an empty tensor instead of None.
    """
    out, weights = aten._native_multi_head_attention.default(*args)
    needs_weights = args[10] if len(args) > 10 else True
    return out, weights if needs_weights else None


def _roll(operand: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.Tensor:
    """Return a result that keeps channels-last layout along one dimension, as the kernel does.

    The meta kernel never keeps it.
    """
    rolled: torch.Tensor = aten.roll.default(operand, shifts, dims)
    return _channels_last(rolled, operand) if len(dims) == 1 else rolled


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the result for all dtypes and alignments.

    The meta kernel rejects some of them, although only the CUDA kernel does.
    """
    del bias
    if left.dim() == right.dim() == 2 and offs is not None:
        shape = [offs.shape[0], left.shape[0], right.shape[1]]
    elif left.dim() == right.dim() == 3:
        shape = [left.shape[0], left.shape[1], right.shape[2]]
    else:
        shape = [left.shape[-2], right.shape[-1]]
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def _sub(left: torch.Tensor, right: Any, **kwargs: Any) -> torch.Tensor:
    """Return the difference. Refuse bool tensors.

    The meta kernel accepts a bool tensor if the other operand is a 0-dim CPU tensor.
    """
    if torch.bool in {left.dtype, getattr(right, "dtype", None)}:
        raise RuntimeError("Subtraction, the `-` operator, with a bool tensor is not supported")
    difference: torch.Tensor = aten.sub.Tensor(left, right, **kwargs)
    return difference


def _mul(left: torch.Tensor, right: Any) -> torch.Tensor:
    """Return the product. If it is float16 or bfloat16, lay it out as kernels do.

    The meta kernel copies the strides of the first operand, even if that operand is an expanded number.
    """
    product: torch.Tensor = aten.mul.Tensor(left, right)
    tensors = [t for t in (left, right) if isinstance(t, torch.Tensor)]  # a 0-dim CPU tensor counts as a number here
    if product.dtype not in {torch.float16, torch.bfloat16} or not any(0 in t.stride() for t in tensors):
        return product
    wide = [
        torch.empty_strided(t.shape, t.stride(), dtype=torch.float32, device="meta")
        if isinstance(t, torch.Tensor)
        else t
        for t in (left, right)
    ]
    return product.new_empty_strided(product.shape, aten.mul.Tensor(*wide).stride())


def _recurrent(func: Any) -> Rule:
    """Return a rule that infers a sequence of any length from a single step. A meta kernel would run for each step."""

    def rule(operand: torch.Tensor, *args: Any) -> Any:
        time = 1 if args[-1] else 0  # True if the batch dimension is first
        length = operand.shape[time]
        out, *states = func(operand.narrow(time, 0, min(length, 1)), *args)
        whole = out.new_empty((length, out.shape[1 - time], out.shape[2]))
        return (whole.transpose(0, 1) if time else whole, *states)

    return rule


def _writes_only(*_args: Any, **_kwargs: Any) -> None:
    """Return nothing, for ops that write their operands and have no meta kernel."""


_UNPREDICTABLE = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def _rule_per_op(rule: Callable[[Any], Rule], names: str) -> dict[Any, Rule]:
    """Return `rule(op)` for each op of `aten` in `names`, such as `"add.Tensor mul.Tensor"`."""
    ops = [getattr(getattr(aten, packet), overload) for packet, overload in map(split_name, names.split())]
    return {func: rule(func) for func in ops}


_RULES: dict[Any, Rule] = {
    aten.native_batch_norm.default: _as_images(_batch_norm(aten.native_batch_norm.default)),
    aten._native_batch_norm_legit.default: _as_images(_batch_norm(aten._native_batch_norm_legit.default)),
    aten._native_batch_norm_legit_no_training.default: _as_images(
        _batch_norm_in_evaluation(aten._native_batch_norm_legit_no_training.default)
    ),
    aten._batch_norm_no_update.default: _as_images(_batch_norm_in_evaluation(aten._batch_norm_no_update.default)),
    **_rule_per_op(
        lambda func: _as_images(_batch_norm_backward(func), 1),
        "native_batch_norm_backward.default batch_norm_backward.default",
    ),
    **_rule_per_op(
        lambda func: _as_images(func, 1),
        "reflection_pad2d_backward.default reflection_pad3d_backward.default replication_pad2d_backward.default "
        "replication_pad3d_backward.default",
    ),
    **_rule_per_op(
        _into_elements,
        "arange.out arange.start_out linspace.out linspace.Scalar_Tensor_out linspace.Tensor_Scalar_out "
        "linspace.Tensor_Tensor_out logspace.out logspace.Scalar_Tensor_out logspace.Tensor_Scalar_out "
        "logspace.Tensor_Tensor_out range.out",
    ),
    aten._native_multi_head_attention.default: _multi_head_attention,
    aten.native_channel_shuffle.default: _as_images(_channel_shuffle),
    **_rule_per_op(
        _as_images,
        "_batch_norm_with_update.default _native_batch_norm_legit.no_stats batch_norm.default channel_shuffle.default "
        "pixel_shuffle.default reflection_pad2d.default reflection_pad3d.default replication_pad2d.default "
        "replication_pad3d.default",
    ),
    **_rule_per_op(
        _row_major,
        "_log_softmax_backward_data.default huber_loss_backward.default isin.Tensor_Scalar isin.Tensor_Tensor "
        "log_sigmoid_forward.default mse_loss_backward.default native_layer_norm_backward.default _standard_gamma.default "
        "normal.Tensor_Tensor normal.float_Tensor poisson.default pow.Scalar rrelu_with_noise.default "
        "smooth_l1_loss_backward.default",
    ),
    **_rule_per_op(
        _pointwise,
        "binary_cross_entropy.default copysign.Scalar copysign.Tensor div.Scalar_mode div.Tensor_mode "
        "elu_backward.default floor_divide.Scalar floor_divide.default hardsigmoid_backward.default "
        "hardswish_backward.default hardtanh_backward.default heaviside.default lcm.default logaddexp.default "
        "logical_and.default logical_or.default logical_xor.default logit_backward.default "
        "native_dropout_backward.default softplus_backward.default special_xlog1py.default xlogy.Tensor",
    ),
    **_rule_per_op(_as_copy, "index_fill.int_Scalar index_fill.int_Tensor"),
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    **_rule_per_op(
        lambda _: _writes_only,
        "_fused_adagrad_.default _fused_adagrad_.tensor_lr _fused_adam_.tensor_lr _fused_adamw_.tensor_lr "
        "_fused_sgd_.default _fused_sgd_.tensor_lr",
    ),
    aten._grouped_mm.default: _grouped_mm,
    aten._histogramdd_bin_edges.default: lambda data, bins, **_: [data.new_empty(count + 1) for count in bins],
    aten.index.Tensor: _index,
    aten.mul.Tensor: _mul,
    aten.native_dropout.default: _native_dropout,
    aten.roll.default: _roll,
    aten.sub.Tensor: _sub,
    aten.index_put.default: _index_put(aten.index_put.default),
    aten.index_put_.default: _index_put(aten.index_put_.default),
    aten.scaled_dot_product_attention.default: _attention,
    aten.kaiser_window.beta: _window,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    **_rule_per_op(_recurrent, "gru.input lstm.input rnn_relu.input rnn_tanh.input"),
}


# Ops whose results follow from metadata in a way that only the kernel knows. The executor is asked once per call. The
# last op writes to a lazy clone, which its kernel refuses; metadata do not show which tensors are lazy clones.
_MATERIALIZE = aten._test_parallel_materialize.default
KERNEL_DECIDES = frozenset({
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    # The library that computes these ops selects the layout by the sizes.
    aten._fft_c2c.default,
    aten._fft_c2r.default,
    aten._fft_r2c.default,
    aten._linalg_svd.default,
    aten.linalg_eig.default,
    aten.max_unpool2d.default,
    aten.native_batch_norm.out,
    # the loss of a single sample has no dimension, but the meta kernel's has one
    aten.multilabel_margin_loss_forward.default,
})  # fmt: skip


# Ops with statistics in the input's dtype on some devices, and in a wider dtype on others, if the input is narrow.
WITH_STATISTICS = frozenset({
    aten.native_layer_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._batch_norm_with_update.default,
    aten._weight_norm_interface.default,
})  # fmt: skip


# Attention with dropout is never recorded whole, so these ops draw no random numbers here, although PyTorch tags them
# so.
_DRAWS_NOTHING = frozenset({
    aten.scaled_dot_product_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
})  # fmt: skip


def is_random(func: Any) -> bool:
    """Return True if `func` draws random numbers. Attention does not, because with dropout its parts are recorded."""
    return torch.Tag.nondeterministic_seeded in func.tags and func not in _DRAWS_NOTHING


def may_be_of_other_dtypes(func: Any, operands: Sequence[TensorMeta]) -> bool:
    """Return True if the kernel decides the result dtypes, so that the client asks the executor once per signature."""
    return func in WITH_STATISTICS and operands[0].dtype in {torch.bfloat16, torch.float16}


def must_ask(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return True if the program must wait for the executor, without trying a meta kernel.

    Either only the executor knows the result metadata, or the op checks the elements of its operands.
    """
    if (
        func in KERNEL_DECIDES
        or func is _MATERIALIZE
        or (func is aten.segment_reduce.default and not kwargs.get("unsafe"))
    ):
        return True
    if is_custom(func) and is_data_dependent(func):
        return True
    return func not in _RULES and any(tag in func.tags for tag in _UNPREDICTABLE)


def rule_for(func: Any) -> Rule:
    """Return the rule for `func`, or `func` itself if its meta kernel is correct."""
    rule: Rule | None = metadata_of(func) if is_custom(func) else _RULES.get(func)
    return func if rule is None else rule
