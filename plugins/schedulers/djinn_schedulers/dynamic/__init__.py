"""The scheduler `dynamic`: chooses an order that meets a memory limit and a latency target."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Scheduler, hookimpl
from djinn_schedulers.dynamic.scheduler import Dynamic

__all__ = ["Dynamic", "djinn_api_version", "djinn_register_schedulers"]

djinn_api_version = "2.0"


@hookimpl
def djinn_register_schedulers() -> Iterable[Scheduler]:
    """Return the scheduler `dynamic`."""
    return [Dynamic()]
