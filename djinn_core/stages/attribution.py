"""Whose fault it was: names of plugin objects in warnings."""

from __future__ import annotations

from typing import Any

from djinn_core.logs import get_logger

_log = get_logger("djinn.stages")


def title(kind: str, plugin: Any) -> str:
    """How messages call a plugin object: its kind, its name and the module that it came from."""
    return f"{kind} {getattr(plugin, 'name', '?')!r} ({type(plugin).__module__})"


def warn_skipped(kind: str, plugin: Any, error: Exception, instead: str) -> str:
    """Log that `plugin` was skipped and what happens instead; returns the sentence for the result's reasons."""
    sentence = f"{title(kind, plugin)} failed with {type(error).__name__}: {error}; {instead}"
    _log.warning(
        "plugin_skipped", plugin=title(kind, plugin), error=f"{type(error).__name__}: {error}", instead=instead
    )
    return sentence
