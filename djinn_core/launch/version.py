"""The version of Djinn that runs."""

from __future__ import annotations

import functools
from importlib import metadata


@functools.cache  # a gateway says it to each client, and looking it up reads files
def djinn_version() -> str:
    """Version of the installed distribution; `unknown` where the source is run without being installed."""
    try:
        return metadata.version("djinn")
    except metadata.PackageNotFoundError:
        return "unknown"
