"""Drops dead code and common subexpressions."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Optimization, hookimpl
from djinn_optimizations.cleanup.optimization import CommonSubexpressions, DeadCode

djinn_api_version = "2.0"


@hookimpl
def djinn_register_optimizations() -> Iterable[Optimization]:
    """The optimizations `common_subexpressions` and `dead_code`, in this order."""
    return [CommonSubexpressions(), DeadCode()]
