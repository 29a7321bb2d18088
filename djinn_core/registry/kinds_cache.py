"""Disk cache of the kinds of hooks that each installed plugin implements, by the times of its files.

A process that a client or a gateway has started leaves plugins unimported that implement none of the kinds that it asks for.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from djinn_core.hookspecs import API_VERSION
from djinn_core.registry.discovery import PluginCandidate
from djinn_core.registry.kinds import KINDS
from djinn_core.registry.report import log
from djinn_core.system.directories import cache_directory
from djinn_core.system.shared_files import replace_file

_FORMAT: Final = 2
FILES_LIMIT: Final = 256  # of a package; what kinds a larger one has is not kept
PLUGINS_LIMIT: Final = 1024
BYTES_LIMIT: Final = 1 << 20
_KINDS: Final = frozenset(kind.name for kind in KINDS)

# Kinds by plugin and digest of its files, so that environments of one user do not take each other's place.
Known = dict[str, tuple[str, ...]]


class KindsCache:
    """Kinds of plugins, as the last process that loaded them found them. Used by one thread."""

    def __init__(self) -> None:
        self._path = _path()
        self._known = _read(self._path)
        self._changed = False
        self._digests: dict[str, str] = {}
        self._places: Mapping[str, str] = {}

    def of(self, candidate: PluginCandidate) -> tuple[str, ...] | None:
        """The kinds of hooks that a plugin implements; None where that is not known, or its files have changed."""
        digest = self._digest(candidate.module)
        return self._known.get(_key(candidate, digest)) if digest else None

    def note(self, candidate: PluginCandidate, kinds: tuple[str, ...]) -> None:
        """Keep what a plugin implements that was loaded."""
        digest = self._digest(candidate.module)
        if digest and self._known.get(key := _key(candidate, digest)) != kinds:
            self._known[key] = kinds
            self._changed = True

    def save(self) -> None:
        """Write what has changed, if anything has and it can be written."""
        if not self._changed:
            return
        latest = dict(list(self._known.items())[-PLUGINS_LIMIT:])
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path, msgspec.json.encode(latest))
        except OSError as error:
            log().debug("kinds of plugins are not kept", file=str(self._path), error=str(error))

    def _digest(self, module: str) -> str:
        """Digest of the files of a module's package; empty where there are none, or too many."""
        package = module.partition(".")[0]
        if package not in self._digests:
            self._places = self._places or _listed()
            self._digests[package] = _digest(package, self._places)
        return self._digests[package]


def _path() -> Path:
    known = repr((_FORMAT, API_VERSION, sorted(_KINDS), sys.version_info[:2])).encode()
    return cache_directory() / f"plugins-{hashlib.blake2b(known, digest_size=8).hexdigest()}.json"


def _read(path: Path) -> Known:
    try:
        if path.stat().st_size > BYTES_LIMIT:
            return {}
        found = msgspec.json.decode(path.read_bytes(), type=Known)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return {key: value for key, value in found.items() if _KINDS.issuperset(value)}


def _key(candidate: PluginCandidate, digest: str) -> str:
    return f"{candidate.name} {candidate.module} {candidate.distribution} {candidate.version} {digest}"


def _listed() -> Mapping[str, str]:
    """By its name what lies in the folders of the import path, and where; of two, the one that is found first."""
    found: dict[str, str] = {}
    for place in sys.path:
        with contextlib.suppress(OSError), os.scandir(place or ".") as entries:
            for entry in entries:
                found.setdefault(entry.name, entry.path)
    return found


def _digest(package: str, listed: Mapping[str, str]) -> str:
    """A digest of names, times and sizes of the files of Python in a package; empty where there are none, or too many."""
    try:
        files = list(_times(_origin(package, listed)))
    except (ImportError, OSError, ValueError):
        return ""
    return hashlib.blake2b(repr(files).encode(), digest_size=16).hexdigest() if len(files) <= FILES_LIMIT else ""


def _origin(package: str, listed: Mapping[str, str]) -> str:
    """The folder of a package, or the file of a module.

    The search for a module asks each folder of the import path once more: it is for those that a listing does not decide.

    Raises:
        ImportError: there is none.
    """
    folder = listed.get(package)
    if folder is not None and f"{package}.py" not in listed and os.path.exists(f"{folder}/__init__.py"):  # noqa: PTH110 - faster
        return folder
    spec = importlib.util.find_spec(package) if package else None
    if spec is None or not spec.origin:
        raise ImportError(name=package)
    return str(Path(spec.origin).parent) if spec.submodule_search_locations else spec.origin


def _times(place: str) -> Iterator[tuple[str, int, int]]:
    if not os.path.isdir(place):  # noqa: PTH112 - faster
        status = Path(place).stat()
        yield place, status.st_mtime_ns, status.st_size
        return
    with os.scandir(place) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            if entry.is_dir():
                if entry.name not in {"tests", "__pycache__"}:
                    yield from _times(entry.path)
            elif entry.name.endswith(".py"):
                status = entry.stat()
                yield entry.path, status.st_mtime_ns, status.st_size
