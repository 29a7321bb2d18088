"""The run strategy `result_cache`: a run that equals an earlier run, such as a repeated prefill, reuses its results."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import RunStrategy, hookimpl
from djinn_result_cache.strategy import ResultCache, Settings

__all__ = ["ResultCache", "Settings", "djinn_api_version", "djinn_register_run_strategies", "djinn_settings"]

djinn_api_version = "2.0"
djinn_settings = Settings


@hookimpl
def djinn_register_run_strategies(settings: Settings) -> Iterable[RunStrategy]:
    """Return the run strategy `result_cache` if its memory budget is above 0."""
    return [ResultCache(settings)] if settings.gib else []
