"""Entry points in Djinn's groups of installed distributions, kept on disk by the times of the folders that they are installed in.

To find them, a file is opened for each distribution there is. Installing or removing one changes the folder, whose entry points are then
read again. A folder is not kept that has just changed, as it may change again within the same tick of its file system; nor one with
`.egg-info`, which is written over in place.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from djinn_core.system.directories import cache_directory
from djinn_core.system.shared_files import replace_file

CORE_DISTRIBUTION: Final = "djinn"
GROUPS: Final = "djinn"  # and what begins with it and a dot
PLACES_LIMIT: Final = 1024
BYTES_LIMIT: Final = 1 << 20
SETTLED_SECONDS: Final = 2.0  # file systems that tell times least exactly tell them to two seconds
_FORMAT: Final = 2
_PIN: Final = re.compile(rf"{CORE_DISTRIBUTION}\s*\(?==\s*([\w.!+-]+)\)?\s*(?:;.*)?")


class DiscoveredEntryPoint(msgspec.Struct, frozen=True, array_like=True):
    """An entry point, with the name and version of its distribution. `pinned`: as of `pinned_release`."""

    group: str
    name: str
    value: str
    distribution: str
    version: str
    pinned: str = ""

    @property
    def entry_point(self) -> importlib.metadata.EntryPoint:
        """The same, which can be loaded."""
        return importlib.metadata.EntryPoint(self.name, self.value, self.group)


@lru_cache(maxsize=1)
def core_version() -> str:
    """Version of the installed distribution of Djinn; empty where the source is run without being installed.

    Asking `importlib.metadata` for it parses the whole file, readme included.
    """
    try:
        found = importlib.metadata.distribution(CORE_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ""
    for line in (found.read_text("METADATA") or "").splitlines():
        if line.startswith("Version: "):
            return line.removeprefix("Version: ").strip()
    return found.version


Places = tuple[tuple[str, int], ...]  # entries of the import path, each with when it changed last
Known = dict[str, tuple[int, tuple[DiscoveredEntryPoint, ...]]]


def installed_points() -> tuple[tuple[str, tuple[DiscoveredEntryPoint, ...]], ...]:
    """By entry of the import path, in its order, the entry points of the distributions there."""
    return _points_of(tuple(map(_state_of, sys.path)))


@lru_cache(maxsize=16)
def _points_of(places: Places) -> tuple[tuple[str, tuple[DiscoveredEntryPoint, ...]], ...]:
    path = cache_directory() / f"entry-points-{_FORMAT}-{sys.version_info[0]}.{sys.version_info[1]}.json"
    known, found = _read(path), []
    fresh: Known = {}
    for place, changed in places:
        kept = known.get(place)
        if kept is not None and kept[0] == changed:
            points = kept[1]
        else:
            points, holds = _points_in(place, changed)
            if holds:
                fresh[place] = changed, points
        found.append((place, points))
    if fresh:
        _write(path, {**known, **fresh})
    return tuple(found)


def _points_in(place: str, changed: int) -> tuple[tuple[DiscoveredEntryPoint, ...], bool]:
    """Those of the distributions in a folder or zip file, and True if they hold until it changes."""
    try:
        names = os.listdir(place)  # noqa: PTH208 - faster
    except NotADirectoryError:
        return tuple(_own(importlib.metadata.distributions(path=[place]))), False
    except OSError:
        return (), False
    if place.endswith(".egg"):
        return tuple(_own(importlib.metadata.distributions(path=[place]))), False
    folders = [name for name in names if name.endswith((".dist-info", ".egg-info")) and _names_groups(place, name)]
    rewritten = any(name.endswith(".egg-info") for name in names)
    points = tuple(_own(importlib.metadata.Distribution.at(Path(place, name)) for name in folders))
    return points, not rewritten and time.time() - changed / 1e9 > SETTLED_SECONDS


def _names_groups(place: str, name: str) -> bool:
    """True if the text of a distribution's entry points has the name of a group: few are worth parsing."""
    with contextlib.suppress(OSError), open(f"{place}/{name}/entry_points.txt", "rb") as file:  # noqa: PTH123 - faster
        return GROUPS.encode() in file.read()
    return False


def _own(distributions: Iterable[importlib.metadata.Distribution]) -> Iterator[DiscoveredEntryPoint]:
    for one in distributions:
        points = [point for point in one.entry_points if f"{point.group}.".startswith(f"{GROUPS}.")]
        if points:
            metadata = one.metadata  # it is read each time
            described = metadata["Name"], metadata["Version"], pinned_release(metadata)
            for point in points:
                yield DiscoveredEntryPoint(point.group, point.name, point.value, *described)


def pinned_release(metadata: importlib.metadata.PackageMetadata) -> str:
    """Return the version of Djinn that a distribution requires exactly; an empty string if it accepts several."""
    for requirement in metadata.get_all("Requires-Dist") or ():
        if found := _PIN.fullmatch(requirement):
            return found[1]
    return ""


def _state_of(place: str) -> tuple[str, int]:
    """An entry of the import path, and when it changed last."""
    place = place or "."
    try:
        return os.path.abspath(place), os.stat(place).st_mtime_ns  # noqa: PTH100, PTH116 - faster
    except OSError:  # it is not there, or the current folder is gone
        return place, 0


def _read(path: Path) -> Known:
    try:
        if path.stat().st_size <= BYTES_LIMIT:
            return msgspec.json.decode(path.read_bytes(), type=Known)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        pass
    return {}


def _write(path: Path, known: Known) -> None:
    content = msgspec.json.encode(dict(list(known.items())[-PLACES_LIMIT:]))
    with contextlib.suppress(OSError):  # they are looked for each time, then
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, content)
