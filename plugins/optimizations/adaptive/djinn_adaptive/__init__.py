"""Switches off optimizations that do not pay, by measured runs."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Optimization, hookimpl
from djinn_adaptive.judging import Adaptive

djinn_api_version = 1


@hookimpl
def djinn_register_optimizations() -> Iterable[Optimization]:
    """The optimization `adaptive`, which judges the others."""
    return [Adaptive()]
