"""The scheduler `priority`: fetched values come first."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import ScheduleMaker, hookimpl
from djinn_priority.scheduler import Priority

__all__ = ["Priority", "djinn_api_version", "djinn_register_schedulers"]

djinn_api_version = 1


@hookimpl
def djinn_register_schedulers() -> Iterable[ScheduleMaker]:
    """The scheduler `priority`."""
    return [Priority()]
