"""FLOPs of the same call here, counted by PyTorch.

The remote device takes apart what a local CPU has one kernel for: LSTM and GRU, encoder layers in evaluation. PyTorch's
counter knows neither these kernels on the CPU nor that of attention; without them, both count the same products.
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
    """FLOPs of a forward pass, or of a training step, which is the second: experts may be chosen otherwise then."""
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
    """FLOPs of the prefill and of the second decoding step of `generate()`; `apart`: of a first call of all parts, as `prefill` has it."""
    model = _counted_fully(model).eval()
    counted: list[int] = []
    plain = model.forward

    @functools.wraps(plain)
    def counting_forward(*args: Any, **kwargs: Any) -> Any:
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _Everywhere()  # type: ignore[assignment]
        with counter:
            output = plain(*args, **kwargs)
        counted.append(counter.get_total_flops())
        return output

    model.forward = counting_forward  # type: ignore[method-assign]
    given = {name: value for name, value in inputs.items() if name not in {"labels", "use_cache"}}
    with _no_fused_kernels(), torch.no_grad():
        model.generate(**given, **GENERATION)
        first, _, decode, *_ = counted
        if apart:
            counted.clear()
            model(**without_labels(model, inputs) | {"use_cache": True})
            (first,) = counted
    return {"prefill": first, "decode": decode}


def _counted_fully(model: nn.Module) -> nn.Module:
    """A copy with experts one after the other: the counter knows no products of groups."""
    model = copy.deepcopy(model)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


class _Everywhere:
    """Stands in for the counter's record of modules, which fails where a module has outputs without gradients."""

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
