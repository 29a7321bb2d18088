"""Overrides for ops whose meta kernel is missing or disagrees with the kernels that compute.

Each rule takes the meta tensors and returns what `func` would, as meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from djinn_core import torch_private
from djinn_core.ir.values import TensorMeta

aten = torch.ops.aten
Rule = Callable[..., Any]


def _batch_norm(func: Any) -> Rule:
    """The kernels return a contiguous output or channels last, the meta kernel keeps strides. In evaluation they return empty statistics."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        out, mean, rstd = func(*args, **kwargs)
        out = out.contiguous(memory_format=torch_private.suggested_format(args[0]))
        training = kwargs.get("training", args[5] if len(args) > 5 else True)
        return (out, mean, rstd) if training else (out, mean.new_empty(0), rstd.new_empty(0))

    return rule


def _batch_norm_in_evaluation(func: Any) -> Rule:
    """As `_batch_norm`, for ops that are always in evaluation; more results may follow."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        out, mean, rstd, *rest = func(*args, **kwargs)
        return out, mean.new_empty(0), rstd.new_empty(0), *rest

    return rule


def _row_major(func: Any) -> Rule:
    """The kernels return a contiguous tensor, the meta kernel keeps strides."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs).contiguous()

    return rule


def _channels_last(func: Any) -> Rule:
    """The kernels keep channels last, the meta kernel does not."""

    def rule(given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return func(given, *args, **kwargs).contiguous(memory_format=torch_private.suggested_format(given))

    return rule


def _bin_edges(data: torch.Tensor, bins: Sequence[int], **_: Any) -> list[torch.Tensor]:
    return [data.new_empty(count + 1) for count in bins]


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The fused kernels lay the result out as the query; what the meta kernel shows is the unfused one."""
    out: torch.Tensor = aten.scaled_dot_product_attention.default(query, key, value, *args, **kwargs)
    return torch.empty_like(query) if out.dim() == 4 and out.shape == query.shape else out


def _index(source: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Predictable unless an index is a mask."""
    if any(i is not None and i.dtype in {torch.bool, torch.uint8} for i in indices):
        raise NotImplementedError("how many elements a mask selects depends on data")
    indexed: torch.Tensor = aten.index.Tensor(source, indices)
    return indexed


def _index_put(func: Any) -> Rule:
    """The meta kernel takes values that cannot be written."""

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


def _convolution(given: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Kernels keep channels last where either the input or the weight does; the meta kernel says so for CUDA alone.

    Over one dimension the weight alone decides, as a picture of one row. Over three dimensions, some kernels keep channels last and
    some do not.
    """
    out: torch.Tensor = aten.convolution.default(given, weight, *args, **kwargs)
    if out.dim() == 3:
        row = weight.unsqueeze(2)
        return _convolution_of(out.unsqueeze(2), row, row).squeeze(2)
    return _convolution_of(out, given, weight)


def _convolution_of(out: torch.Tensor, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wanted = {4: torch.channels_last, 5: torch.channels_last_3d}.get(out.dim())
    if wanted is None or all(torch_private.suggested_format(t) is not wanted for t in (given, weight)):
        return out
    if out.dim() == 5:
        raise NotImplementedError("the kernel that is chosen decides the layout")
    return out.contiguous(memory_format=wanted)


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The meta kernel refuses what only the CUDA kernel would: other dtypes than bfloat16, and unaligned rows."""
    del bias
    if left.dim() == right.dim() == 2 and offs is not None:
        shape = [offs.shape[0], left.shape[0], right.shape[1]]
    elif left.dim() == right.dim() == 3:
        shape = [left.shape[0], left.shape[1], right.shape[2]]
    else:
        shape = [left.shape[-2], right.shape[-1]]
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def _sub(left: torch.Tensor, right: Any, **kwargs: Any) -> torch.Tensor:
    """The meta kernel takes a bool where a number in the shape of a CPU tensor is the other operand."""
    if torch.bool in {left.dtype, getattr(right, "dtype", None)}:
        raise RuntimeError("Subtraction, the `-` operator, with a bool tensor is not supported")
    difference: torch.Tensor = aten.sub.Tensor(left, right, **kwargs)
    return difference


def _mul(left: torch.Tensor, right: Any) -> torch.Tensor:
    """In narrow dtypes the meta kernel lays out by the first operand, also where that is one number, expanded."""
    product: torch.Tensor = aten.mul.Tensor(left, right)
    tensors = [
        t for t in (left, right) if isinstance(t, torch.Tensor)
    ]  # a number in the shape of a CPU tensor is a number here
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
    """One step tells what a sequence of any length returns; meta kernels would be run for each of its steps."""

    def rule(given: torch.Tensor, *args: Any) -> Any:
        time = 1 if args[-1] else 0  # whether the batch comes first
        length = given.shape[time]
        out, *states = func(given.narrow(time, 0, min(length, 1)), *args)
        whole = out.new_empty((length, out.shape[1 - time], out.shape[2]))
        return (whole.transpose(0, 1) if time else whole, *states)

    return rule


_UNPREDICTABLE = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_RULES: dict[Any, Rule] = {
    aten.native_batch_norm.default: _batch_norm(aten.native_batch_norm.default),
    aten._native_batch_norm_legit.default: _batch_norm(aten._native_batch_norm_legit.default),
    aten._native_batch_norm_legit_no_training.default: _batch_norm_in_evaluation(
        aten._native_batch_norm_legit_no_training.default
    ),
    aten._batch_norm_no_update.default: _batch_norm_in_evaluation(aten._batch_norm_no_update.default),
    aten.convolution.default: _convolution,
    aten._grouped_mm.default: _grouped_mm,
    aten._histogramdd_bin_edges.default: _bin_edges,
    aten.index.Tensor: _index,
    aten.mul.Tensor: _mul,
    aten.sub.Tensor: _sub,
    aten.index_put.default: _index_put(aten.index_put.default),
    aten.index_put_.default: _index_put(aten.index_put_.default),
    **{
        func: _row_major(func)
        for func in (
            aten._standard_gamma.default,
            aten.normal.Tensor_Tensor,
            aten.normal.float_Tensor,
            aten.poisson.default,
        )
    },
    **{
        func: _channels_last(func)
        for func in (
            aten.reflection_pad2d.default,
            aten.reflection_pad3d.default,
            aten.replication_pad2d.default,
            aten.replication_pad3d.default,
        )
    },
    aten.scaled_dot_product_attention.default: _attention,
    aten.kaiser_window.beta: _window,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    **{func: _recurrent(func) for func in (aten.gru.input, aten.lstm.input, aten.rnn_relu.input, aten.rnn_tanh.input)},
}


# Ops whose results follow from metadata, but in a way that only the kernel knows: asked once per call, then remembered.
# It writes to a lazy clone, which its kernel refuses; metadata do not tell which tensors are such clones.
_MATERIALIZE = aten._test_parallel_materialize.default
KERNEL_DECIDES = frozenset({
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    # Laid out by the library that computes them, for some dimensions one way, for some another.
    aten._fft_c2c.default,
    aten._fft_c2r.default,
    aten._fft_r2c.default,
    aten._linalg_svd.default,
    aten.linalg_eig.default,
    aten.max_unpool2d.default,
    aten.native_batch_norm.out,
    aten.multilabel_margin_loss_forward.default,  # a single sample's loss has no dimension, the meta kernel's has one
})  # fmt: skip


# Ops whose statistics have the dtype of the input on some devices and are wider on others, where the input is narrow.
WITH_STATISTICS = frozenset({
    aten.native_layer_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._batch_norm_with_update.default,
    aten._weight_norm_interface.default,
})  # fmt: skip


# Attention with dropout is never recorded whole, so what PyTorch calls random draws nothing here.
_DRAWS_NOTHING = frozenset({
    aten.scaled_dot_product_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
})  # fmt: skip


def is_random(func: Any) -> bool:
    """True if `func` draws random numbers, where it is recorded."""
    return torch.Tag.nondeterministic_seeded in func.tags and func not in _DRAWS_NOTHING


def may_be_of_other_dtypes(func: Any, operands: Sequence[TensorMeta]) -> bool:
    """True if the kernel decides the dtypes of the results: asked once for each signature, then cached."""
    return func in WITH_STATISTICS and operands[0].dtype in {torch.bfloat16, torch.float16}


def must_ask(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """True if the executor is waited for: only it knows the result metadata, or the program asks for a check of its data.

    A meta kernel is not tried then.
    """
    if (
        func in KERNEL_DECIDES
        or func is _MATERIALIZE
        or (func is aten.segment_reduce.default and not kwargs.get("unsafe"))
    ):
        return True
    return func not in _RULES and any(tag in func.tags for tag in _UNPREDICTABLE)


def rule_for(func: Any) -> Rule:
    """The rule for `func`: itself, where its meta kernel is right."""
    rule: Rule = _RULES.get(func, func)
    return rule
