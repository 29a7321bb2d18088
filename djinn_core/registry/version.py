"""The version of Djinn that runs."""

from __future__ import annotations

from djinn_core.registry.entry_points import core_version


def djinn_version() -> str:
    """Version of the installed distribution; `unknown` where the source is run without being installed."""
    return core_version() or "unknown"
