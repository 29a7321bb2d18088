"""Ops that are recorded as other ops, or after a check. Each section of the module has one reason."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from djinn_client import torch_dispatch
from djinn_client.interception.device.device_state import Handler, device_state
from djinn_client.interception.dispatch import handles, record
from djinn_client.interception.native.library import set_kernel
from djinn_client.interception.shape_inference.trials import try_small
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.torch_private import schema_of

aten = torch.ops.aten


# Canonicalization: calls with the same meaning are recorded alike, so that programs match their cached templates. Also:
# side effects of kernels are recorded as ops if the client must know them.
@handles(aten.fill_.Scalar, repeats=True)
def fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record `tensor.fill_(True)` as `fill_(1)` for every dtype.

    A bool would be a constant of the form; a number is a slot.

    Without this rule, the last step of a `generate()` would differ from other steps only by such a bool.
    """
    target, value = args
    return record(func, (target, int(value)) if isinstance(value, bool) else args, kwargs)


@handles(aten.index_put_.default, aten._index_put_impl_.default)
def put_at_mask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record `tensor[mask] = number` as `masked_fill_` if the mask or the number is in the memory of `tensor`.

    PyTorch's CPU kernel calls `masked_fill_` for every mask. Unlike `index_put_`, `masked_fill_` may write to its own
    mask and number.
    """
    target, indices, values, *rest = args
    accumulates = kwargs.get("accumulate", rest[0] if rest else False)
    mask = None if accumulates or values.numel() != 1 else _only_mask(target, indices)
    if mask is None or not (_shares_memory(mask, target) or _shares_memory(values, target)):
        return record(func, args, kwargs)
    for _ in range(mask.dim(), target.dim() - _leading(indices)):
        mask = aten.unsqueeze.default(mask, -1)
    number = aten.view.default(values, []) if values.dim() else values
    return record(aten.masked_fill_.Tensor, (target, mask, number), {})


def _leading(indices: Sequence[torch.Tensor | None]) -> int:
    """Return the number of dimensions before the first index."""
    return next(dim for dim, index in enumerate(indices) if index is not None)


def _only_mask(target: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the only index if it is a mask that fits `target`, otherwise None."""
    tensors = [index for index in indices if index is not None]
    if len(tensors) != 1 or tensors[0].dtype not in {torch.bool, torch.uint8}:
        return None
    (mask,), dim = tensors, _leading(indices)
    return mask if mask.shape == target.shape[dim : dim + mask.dim()] else None


def _shares_memory(tensor: torch.Tensor, second: torch.Tensor) -> bool:
    if not isinstance(tensor, LazyTensor) or not isinstance(second, LazyTensor):
        return False
    return tensor.remote.storage == second.remote.storage


@handles(aten._fused_moving_avg_obs_fq_helper.default)
def observe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle fake quantization per channel: first resize empty observers to one element per channel, as the kernel does."""
    schema = (a.name for a in schema_of(func).arguments)
    arguments = dict(zip(schema, args, strict=False)) | kwargs
    limits = {"running_min": torch.inf, "running_max": -torch.inf}
    if arguments.get("per_row_fake_quant") and arguments["running_min"].numel() == 0:
        channels = arguments["self"].shape[arguments["ch_axis"]]
        for name in ("running_min", "running_max", "scale", "zero_point"):
            observer = aten.resize_.default(arguments[name], [channels])
            if name in limits:
                aten.fill_.Scalar(observer, limits[name])
    return record(func, args, kwargs)


# Ops without a deterministic kernel on any device: PyTorch's alert comes at the op. The executor would raise its error
# only at the next sync point, and would keep its warning. Alerts of further CUDA kernels come from the executor.
@handles(aten.put.default, aten.put_.default, aten.max_unpool2d.default, aten.max_unpool3d.default)
def record_alerting(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the op. If deterministic algorithms are on, raise or warn first, as PyTorch does.

    Raises:
        RuntimeError: the error of eager PyTorch.
    """
    if torch.are_deterministic_algorithms_enabled():
        try:
            try_small(func, args, kwargs)
        except RuntimeError as error:
            if "deterministic" in str(error):
                raise
    return record(func, args, kwargs)


# Fused ops that PyTorch and libraries use on every device except the CPU, built from ops that every executor has. The
# fused cells of LSTM and GRU and `histc` of integers exist only for CUDA, but programs must also run on a CPU executor.
# Packing of sequences reads lengths and returns batch sizes on the CPU, which no op on one device can do.
def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Handle `aten::_thnn_fused_lstm_cell`: return new hidden state, new cell state, and a workspace for its backward.

    Gates are (batch, 4 * hidden), states (batch, hidden).
    """
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    entrance, forget, candidate, output = gates.chunk(4, dim=1)
    new_cell = forget.sigmoid() * cell + entrance.sigmoid() * candidate.tanh()
    return output.sigmoid() * new_cell.tanh(), new_cell, gates.new_empty(0)


def gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Handle `aten::_thnn_fused_gru_cell`: return the new hidden state, and a workspace for its backward.

    Gates are (batch, 3 * hidden), the state (batch, hidden).
    """
    input_reset, input_update, input_new = _biased(input_gates, input_bias).chunk(3, dim=1)
    hidden_reset, hidden_update, hidden_new = _biased(hidden_gates, hidden_bias).chunk(3, dim=1)
    reset = (hidden_reset + input_reset).sigmoid()
    update = (hidden_update + input_update).sigmoid()
    new = (input_new + hidden_new * reset).tanh()
    return (hidden - new) * update + new, hidden_gates.new_empty(0)


def _biased(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gates if bias is None else gates + bias


def pack_padded_sequence(
    padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Handle `aten::_pack_padded_sequence`: compute the row indices on the CPU, and gather the rows remotely."""
    outer = padded.shape[:2]
    positions = torch.arange(outer.numel(), device="cpu").view(outer)
    rows, batch_sizes = aten._pack_padded_sequence.default(positions, lengths.to("cpu"), batch_first)
    return padded.flatten(0, 1).index_select(0, rows.to(padded.device)), batch_sizes


@handles(aten.histc.default)
def histc(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `aten::histc`: count integers as float64, which is exact up to 2**53."""
    values = args[0]
    if values.is_floating_point():
        return record(func, args, kwargs)
    counts = record(func, (values.double(), *args[1:]), kwargs)
    return counts.to(values.dtype)


@handles(aten.dot.default, aten.vdot.default)
def dot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a dot product. If an operand is a zero tensor of autograd, return a zero tensor, as PyTorch's kernels do."""
    product = record(func, args, kwargs)
    if any(isinstance(a, torch.Tensor) and a._is_zerotensor() for a in args):
        return torch._efficientzerotensor((), dtype=product.dtype, device=product.device)
    return product


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._pack_padded_sequence.default: pack_padded_sequence,
}


def register() -> None:
    """Register the decompositions of `_DECOMPOSITIONS` and of control-flow ops.

    They run above autograd, which then differentiates the parts. Handlers decompose the ops in inference mode.
    """
    for func, decomposition in _DECOMPOSITIONS.items():
        set_kernel(func.name(), decomposition, "AutogradPrivateUse1")
        handles(func)(_handler(decomposition))
    for name, op in torch_dispatch.higher_order_ops().items():
        by_ops = torch_dispatch.composite_implementation(op)
        wrapper = torch_dispatch.differentiated(op)
        if by_ops is not None and wrapper is not None and name in _CONTROL_FLOW:
            torch_dispatch.implement_under_autograd(op, _unless_traced(by_ops, wrapper))


def _handler(decomposition: Callable[..., Any]) -> Handler:
    return lambda _func, args, kwargs: decomposition(*args, **kwargs)


# `nn.TransformerEncoder` with a padding mask: in evaluation PyTorch drops the padding with nested tensors, runs the
# layers on the rest, and writes zeros to the padding. Here the layers get the padding and a mask, and the zeros are
# written at the end.
@handles(torch.ops.aten._nested_tensor_from_mask_left_aligned.default)
def left_aligned(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """Store whether the padding is at the end of each row. Return False, because True makes PyTorch drop it."""
    lengths = args[1]
    device_state.thread.padding_is_last = not bool((lengths[:, 1:] & ~lengths[:, :-1]).any())
    return False


def pad_with_zeros(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a `TransformerEncoder.forward` that writes zeros to the padding, as PyTorch does."""

    @functools.wraps(forward)
    def encode(
        self: torch.nn.TransformerEncoder,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        device_state.thread.padding_is_last = False
        out = forward(self, src, mask, src_key_padding_mask, is_causal)
        unsupported = (
            device_state.thread.padding_is_last
            and mask is None
            and not torch.is_autocast_enabled()
            and not _differentiated(self, src)
        )
        if not unsupported or src_key_padding_mask is None or not isinstance(out, LazyTensor):
            return out
        padding = src_key_padding_mask if src_key_padding_mask.dtype == torch.bool else src_key_padding_mask != 0
        zeros = out.new_zeros(out.shape[-1])
        return torch.where(padding.unsqueeze(-1), zeros if self.norm is None else self.norm(zeros), out)

    return encode


def _differentiated(encoder: torch.nn.TransformerEncoder, src: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in (src, *encoder.layers[0].parameters()))


# Higher-order ops that call functions of the user, such as `torch.cond`. Others have their own gradients. The functions
# run op by op, and each op is recorded. PyTorch's autograd kernel would trace the functions, which would have to be in
# the form that `torch.compile` makes.
_CONTROL_FLOW = frozenset({"associative_scan", "cond", "map_impl", "scan", "while_loop"})


def _unless_traced(by_ops: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `by_ops`, or PyTorch's own `traced` if a tracer must see the op whole."""

    def implementation(*args: Any, **kwargs: Any) -> Any:
        remote = any(isinstance(leaf, LazyTensor) for leaf in pytree.tree_leaves((args, kwargs)))
        return (by_ops if remote and not torch_dispatch.dispatch_modes() else traced)(*args, **kwargs)

    return implementation
