"""`nn.TransformerEncoder` with a padding mask, for which PyTorch uses nested tensors; the remote device has none.

In evaluation PyTorch drops the padding, runs the layers on what is left, and puts zeros where the padding was. Here the layers get
the padding and a mask, with the same results elsewhere, and the zeros are filled in at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.dispatch import handles
from djinn_client.interception.tensors.lazy_tensor import LazyTensor

Forward = Callable[..., torch.Tensor]


@handles(torch.ops.aten._nested_tensor_from_mask_left_aligned.default)
def left_aligned(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """Check whether padding comes last in each row, in which case PyTorch drops it. Returns False, and keeps the result."""
    kept = args[1]
    device_state.thread.padding_is_last = not bool((kept[:, 1:] & ~kept[:, :-1]).any())
    return False


def pad_with_zeros(forward: Forward) -> Forward:
    """`TransformerEncoder.forward` that returns zeros for padding where PyTorch does."""

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
        dropped = (
            device_state.thread.padding_is_last
            and mask is None
            and not torch.is_autocast_enabled()
            and not _differentiated(self, src)
        )
        if not dropped or src_key_padding_mask is None or not isinstance(out, LazyTensor):
            return out
        padding = src_key_padding_mask if src_key_padding_mask.dtype == torch.bool else src_key_padding_mask != 0
        zeros = out.new_zeros(out.shape[-1])
        return torch.where(padding.unsqueeze(-1), zeros if self.norm is None else self.norm(zeros), out)

    return encode


def _differentiated(encoder: torch.nn.TransformerEncoder, src: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in (src, *encoder.layers[0].parameters()))
