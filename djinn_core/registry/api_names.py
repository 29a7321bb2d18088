"""Names of the module `djinn` that packages bring: found by their entry points, and imported when a program asks for one."""

from __future__ import annotations

from typing import Any, Final

from djinn_core.errors import PluginError
from djinn_core.registry.discovery import installed
from djinn_core.registry.loading import PluginLoader
from djinn_core.registry.selection import Selection
from djinn_core.settings import resolve

_KIND: Final = "api_names"


def find_api_name(name: str) -> Any | None:
    """The function or class that `djinn.<name>` stands for; None where no plugin in use brings it. The setting `plugins` leaves such names alone.

    Raises:
        ConfigurationError: a setting is wrong.
    """
    candidates = [candidate for candidate in installed() if _KIND in candidate.points]
    if not candidates:
        return None
    loader = PluginLoader(Selection.from_settings(resolve().settings), {_KIND})
    for candidate in candidates:
        loader.take(candidate)
    for offered in loader.load(_KIND):
        if offered.name == name:
            return offered.load()
    loader.tell_failures()
    return None


def absent(name: str, folder: str) -> PluginError:
    """The error where the package in a folder of Djinn's repository that brings `djinn.<name>` is not in use."""
    return PluginError(
        f"`djinn.{name}` is in a package of Djinn's repository that is not in use: `pip install ./{folder}` in a checkout. "
        "`djinn plugins` shows what is installed, disabled or broken"
    )
