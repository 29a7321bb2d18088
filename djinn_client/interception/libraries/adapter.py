"""Integrations made of functions, and the condition under which a library that chooses a device by itself chooses the remote one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch


@attrs.define
class Adapter:
    """An `Integration` made of a function: `Adapter("transformers.trainer", adapt_trainer)`."""

    module: str
    adapt: Callable[[Any], None]
    only_under_run: bool = attrs.field(default=False, kw_only=True)
    name: str = attrs.field(kw_only=True)

    @name.default
    def _of_function(self) -> str:
        return f"{self.adapt.__module__}.{self.adapt.__qualname__}: {self.module}"


def is_the_only_accelerator() -> bool:
    """True if PyTorch finds no accelerator on this machine, so that libraries would fall back to the CPU."""
    return not (torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available())
