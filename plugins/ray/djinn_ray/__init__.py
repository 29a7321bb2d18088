"""The launcher `ray`: executors on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Launcher, hookimpl
from djinn_ray.launcher import RayLauncher, Settings

__all__ = ["RayLauncher", "Settings", "djinn_api_version", "djinn_register_launchers", "djinn_settings"]

djinn_api_version = 1
djinn_settings = Settings


@hookimpl
def djinn_register_launchers(settings: Settings) -> Iterable[Launcher]:
    """The launcher `ray`. Ray itself is imported when executors are launched."""
    return [RayLauncher(settings)]
