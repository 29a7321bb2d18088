"""FLOPs of the same call here, counted by PyTorch.

The remote device takes apart what a local CPU has one kernel for: attention under autograd, LSTM and GRU, encoder layers in
evaluation. PyTorch's counter knows none of these kernels on the CPU; without them, both count the same products.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from likeness import loss_of
from situations import without_cache, without_labels
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def flops_here(model: nn.Module, inputs: Mapping[str, Any], situation: str) -> int:
    """FLOPs of a forward pass or of forward and backward of a training step."""
    model = copy.deepcopy(model)
    with _no_fused_kernels(), FlopCounterMode(display=False) as counter:
        if situation == "forward":
            with torch.no_grad():
                model.eval()(**without_labels(model, inputs))
        else:
            loss_of(model.train()(**inputs, **without_cache(model))).backward()
    return counter.get_total_flops()


@contextmanager
def _no_fused_kernels() -> Iterator[None]:
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
