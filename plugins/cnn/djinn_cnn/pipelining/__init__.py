"""Optimizations that let several devices process successive inputs of a model, or parts of one batch."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Optimization, hookimpl
from djinn_cnn.pipelining.optimization import Pipelining
from djinn_cnn.pipelining.splitting import SplitBatches

__all__ = ["Pipelining", "SplitBatches", "djinn_api_version", "djinn_register_optimizations"]

djinn_api_version = "2.0"


@hookimpl
def djinn_register_optimizations() -> Iterable[Optimization]:
    """Return the optimizations `pipelining` and `split_batches`."""
    return [Pipelining(), SplitBatches()]
