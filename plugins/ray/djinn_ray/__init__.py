"""The engine `ray`: starts executors on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import ExecutorEngine, hookimpl
from djinn_ray.engine import RayEngine, Settings

__all__ = ["RayEngine", "Settings", "djinn_api_version", "djinn_register_executors", "djinn_settings"]

djinn_api_version = "2.0"
djinn_settings = Settings


@hookimpl
def djinn_register_executors(settings: Settings) -> Iterable[ExecutorEngine]:
    """Return the engine `ray`. Ray is imported when executors are launched."""
    return [RayEngine(settings)]
