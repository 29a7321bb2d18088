"""`apply_`, `map_` and `map2_`: a Python function of each element, which runs where the program runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from djinn_core.tracebacks import for_users


def on_fetched(plain: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The method `plain` of CPU tensors for remote ones: on fetched copies, whose result is uploaded."""

    def method(self: torch.Tensor, *arguments: Any) -> torch.Tensor:
        fetched = self.cpu()  # with its history, about which PyTorch has an error of its own
        plain(fetched, *(a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments))
        return self.copy_(fetched)

    method.__name__, method.__doc__ = plain.__name__, plain.__doc__
    return for_users(method)
