"""The version of this Djinn, and the version of Djinn that a plugin's distribution requires."""

from __future__ import annotations

import importlib.metadata
import re
from functools import lru_cache
from typing import Final

CORE_DISTRIBUTION: Final = "djinn"
_PIN: Final = re.compile(rf"{CORE_DISTRIBUTION}\s*\(?==\s*([\w.!+-]+)\)?\s*(?:;.*)?")


@lru_cache(maxsize=1)
def core_version() -> str:
    """Return the version of the installed distribution of Djinn; empty if Djinn runs from source without installation.

    `importlib.metadata` would parse the whole metadata file, including the readme.
    """
    try:
        distribution = importlib.metadata.distribution(CORE_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ""
    for line in (distribution.read_text("METADATA") or "").splitlines():
        if line.startswith("Version: "):
            return line.removeprefix("Version: ").strip()
    return distribution.version


def djinn_version() -> str:
    """Return the version of the installed distribution; `unknown` if Djinn runs from source without installation."""
    return core_version() or "unknown"


@lru_cache(maxsize=256)
def name_and_versions(distribution: importlib.metadata.Distribution) -> tuple[str, str, str]:
    """Return the name and version of a distribution, and the only version of Djinn that it accepts.

    The last item is empty if the distribution accepts several versions.
    """
    metadata = distribution.metadata
    pins = (pin[1] for one in metadata.get_all("Requires-Dist") or () if (pin := _PIN.fullmatch(one)))
    return metadata["Name"], metadata["Version"], next(pins, "")
