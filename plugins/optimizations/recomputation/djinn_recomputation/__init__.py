"""Computes values again where they are wanted, in place of sending them, where that is quicker."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Optimization, hookimpl
from djinn_recomputation.optimization import Recomputation

__all__ = ["Recomputation", "djinn_api_version", "djinn_register_optimizations"]

djinn_api_version = 1


@hookimpl
def djinn_register_optimizations() -> Iterable[Optimization]:
    """The optimization `recomputation`."""
    return [Recomputation()]
