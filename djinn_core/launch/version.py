"""The version of Djinn that runs."""

from __future__ import annotations

from importlib import metadata


def djinn_version() -> str:
    """Version of the installed distribution; `unknown` where the source is run without being installed."""
    try:
        return metadata.version("djinn")
    except metadata.PackageNotFoundError:
        return "unknown"
