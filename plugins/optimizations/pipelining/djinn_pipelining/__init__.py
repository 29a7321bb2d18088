"""Has several devices work on successive inputs of one model."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Optimization, hookimpl
from djinn_pipelining.optimization import Pipelining

__all__ = ["Pipelining", "djinn_api_version", "djinn_register_optimizations"]

djinn_api_version = 1


@hookimpl
def djinn_register_optimizations() -> Iterable[Optimization]:
    """The optimization `pipelining`."""
    return [Pipelining()]
