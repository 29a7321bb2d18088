"""FLOPs of the same call on the CPU, counted by PyTorch.

The remote device decomposes ops that have one kernel on a local CPU: LSTM and GRU, encoder layers in evaluation.
PyTorch's counter supports neither these CPU kernels nor the attention kernel. Without them, both count the same
products.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from evaluation.semantics.situations import GENERATION, SEED, backward, optimizer_of, without_labels


def flops_here(model: nn.Module, inputs: Mapping[str, Any], situation: str) -> int:
    """Return the FLOPs of a forward pass or a training step: the second, because experts may change after the first."""
    model = _counted_fully(model)
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _Everywhere()  # type: ignore[assignment]
    with _no_fused_kernels():
        if situation == "forward":
            with torch.no_grad(), counter:
                model.eval()(**without_labels(model, inputs))
        else:
            model.train()
            torch.manual_seed(SEED)
            optimizer = optimizer_of(model)
            backward(model, inputs)
            optimizer.step()
            optimizer.zero_grad()
            with counter:
                backward(model, inputs)
    return counter.get_total_flops()


def flops_written(model: nn.Module, inputs: Mapping[str, Any], *, apart: bool) -> dict[str, int]:
    """Return the FLOPs of prefill and of the second decode step of `generate()`, by situation.

    `apart`: True to count a first call of all parts of the model as prefill.
    """
    model = _counted_fully(model).eval()
    flops: list[int] = []
    plain = model.forward

    @functools.wraps(plain)
    def counting_forward(*args: Any, **kwargs: Any) -> Any:
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _Everywhere()  # type: ignore[assignment]
        with counter:
            output = plain(*args, **kwargs)
        flops.append(counter.get_total_flops())
        return output

    model.forward = counting_forward  # type: ignore[method-assign]
    options = {name: value for name, value in inputs.items() if name not in {"labels", "use_cache"}}
    with _no_fused_kernels(), torch.no_grad():
        model.generate(**options, **GENERATION)
        first, _, decode, *_ = flops
        if apart:
            flops.clear()
            model(**without_labels(model, inputs) | {"use_cache": True})
            (first,) = flops
    return {"prefill": first, "decode": decode}


def _counted_fully(model: nn.Module) -> nn.Module:
    """Return a copy that runs experts sequentially, because the counter does not support grouped products."""
    model = copy.deepcopy(model)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


class _Everywhere:
    """Replacement of the counter's module tracker, which fails for module outputs without gradients."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def _no_fused_kernels() -> Iterator[None]:
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
