"""The scheduler `parallel`: what most still depends on comes first."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import ScheduleMaker, hookimpl
from djinn_parallel.scheduler import Parallel

__all__ = ["Parallel", "djinn_api_version", "djinn_register_schedulers"]

djinn_api_version = 1


@hookimpl
def djinn_register_schedulers() -> Iterable[ScheduleMaker]:
    """The scheduler `parallel`."""
    return [Parallel()]
