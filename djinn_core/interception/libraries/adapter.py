"""Integrations made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs


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
