"""Ops that PyTorch and libraries use on every device that is not a CPU, made of ops that every executor has.

The fused cells of LSTM and GRU and `histc` of integers exist for CUDA only, but programs must run on a CPU executor, too. Packing of
sequences reads lengths and returns batch sizes on the CPU, which no op on one device can do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from djinn_client.interception.device.device_state import Handler
from djinn_client.interception.dispatch import handles, record
from djinn_client.interception.native.library import set_kernel

aten = torch.ops.aten


def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`aten::_thnn_fused_lstm_cell`: new hidden state, new cell state, and the workspace that only its own backward reads.

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
    """`aten::_thnn_fused_gru_cell`: new hidden state, and the workspace that only its own backward reads.

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
    """`aten::_pack_padded_sequence`: packing positions on the CPU says which rows to take remotely."""
    outer = padded.shape[:2]
    positions = torch.arange(outer.numel(), device="cpu").view(outer)
    rows, batch_sizes = aten._pack_padded_sequence.default(positions, lengths.to("cpu"), batch_first)
    return padded.flatten(0, 1).index_select(0, rows.to(padded.device)), batch_sizes


@handles(aten.histc.default)
def histc(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whole numbers are counted as float64, which is exact up to 2**53."""
    values = args[0]
    if values.is_floating_point():
        return record(func, args, kwargs)
    counts = record(func, (values.double(), *args[1:]), kwargs)
    return counts.to(values.dtype)


_MADE_OF: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._pack_padded_sequence.default: pack_padded_sequence,
}


def register() -> None:
    """Register them above autograd, which then differentiates what they are made of, and for inference mode."""
    for func, made_of in _MADE_OF.items():
        set_kernel(func.name(), made_of, "AutogradPrivateUse1")
        handles(func)(_handler(made_of))


def _handler(made_of: Callable[..., Any]) -> Handler:
    return lambda _func, args, kwargs: made_of(*args, **kwargs)
