"""Move a pooling before ops that can process the pooled elements instead."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Optimization, hookimpl
from djinn_optimizations.pooling.optimization import PoolFirst

__all__ = ["PoolFirst", "djinn_api_version", "djinn_register_optimizations"]

djinn_api_version = "2.0"


@hookimpl
def djinn_register_optimizations() -> Iterable[Optimization]:
    """Return the optimization `pool_first`."""
    return [PoolFirst()]
