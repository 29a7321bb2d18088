"""Divide the prefill of a long prompt among several devices (sequence parallelism)."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Optimization, hookimpl
from djinn_optimizations.prefill.optimization import DivideSequences

__all__ = ["DivideSequences", "djinn_api_version", "djinn_register_optimizations"]

djinn_api_version = "2.0"


@hookimpl
def djinn_register_optimizations() -> Iterable[Optimization]:
    """Return the optimization `prefill`."""
    return [DivideSequences()]
