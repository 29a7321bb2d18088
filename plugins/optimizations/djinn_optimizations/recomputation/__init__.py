"""Recompute a value on the device that uses it, if this is faster than a transfer."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Optimization, hookimpl
from djinn_optimizations.recomputation.optimization import Recomputation

__all__ = ["Recomputation", "djinn_api_version", "djinn_register_optimizations"]

djinn_api_version = "2.0"


@hookimpl
def djinn_register_optimizations() -> Iterable[Optimization]:
    """Return the optimization `recomputation`."""
    return [Recomputation()]
