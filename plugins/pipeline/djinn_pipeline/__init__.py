"""The scheduler `pipeline`: devices work on successive inputs, the oldest first."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import ScheduleMaker, hookimpl
from djinn_pipeline.scheduler import Pipeline

__all__ = ["Pipeline", "djinn_api_version", "djinn_register_schedulers"]

djinn_api_version = 1


@hookimpl
def djinn_register_schedulers() -> Iterable[ScheduleMaker]:
    """The scheduler `pipeline`."""
    return [Pipeline()]
