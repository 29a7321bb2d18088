"""Disk cache of compiled libraries, shared with later processes.

A file name has a digest of the packed graph, and a digest of the processor's instruction set and the versions of Djinn,
PyTorch and Python. Executors load this native code, so only this user can write to the directory, and a checksum
detects damage. Any failure is a cache miss.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from pathlib import Path
from typing import Final

import torch

from djinn_core.errors import DjinnError
from djinn_core.logs import get_logger
from djinn_core.registry.version import djinn_version
from djinn_core.system.directories import cache_directory
from djinn_core.system.limits import processor_kind
from djinn_core.system.private_directories import private_directory
from djinn_core.system.shared_files import replace_file

_FORMAT: Final = 2
BYTES_LIMIT: Final = 256 << 20  # of all files; the least recently used are evicted first
_CHECKSUM_BYTES: Final = 16
_log = get_logger("djinn.server")


class DiskLibraryCache:
    """A disk cache of one compiler's libraries.

    Args:
        compiler: name of the compiler, with a version number of its output format.
    """

    def __init__(self, compiler: str) -> None:
        facts = _FORMAT, compiler, djinn_version(), torch.__version__, sys.version, processor_kind()
        self._versions = hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
        self._directory = cache_directory() / "libraries"

    def get(self, packed: bytes) -> bytes | None:
        """Return the library of a packed graph, or None if it is not cached."""
        try:
            path = private_directory(self._directory, "compiled programs") / self._name(packed)
            content = path.read_bytes()
        except (OSError, DjinnError) as error:
            _log.debug("a compiled library is not in the cache", error=str(error))
            return None
        library = content[_CHECKSUM_BYTES:]
        if content[:_CHECKSUM_BYTES] != _checksum(library):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        _log.info("a library was compiled by an earlier process", file=path.name)
        return library

    def put(self, packed: bytes, library: bytes) -> None:
        """Store the library of a graph."""
        try:
            directory = private_directory(self._directory, "compiled programs")
            replace_file(directory / self._name(packed), _checksum(library) + library)
            _remove_oldest(directory)
        except (OSError, DjinnError) as error:
            _log.debug("a compiled library cannot be cached", error=str(error))

    def is_empty(self) -> bool:
        """Return True if the cache has no library for the present versions."""
        return not any(self._directory.glob(f"{self._versions}-*.lib"))

    def _name(self, packed: bytes) -> str:
        return f"{self._versions}-{hashlib.blake2b(packed, digest_size=20).hexdigest()}.lib"


def _checksum(library: bytes) -> bytes:
    return hashlib.blake2b(library, digest_size=_CHECKSUM_BYTES).digest()


def _remove_oldest(directory: Path) -> None:
    libraries = sorted([(path.stat().st_mtime, path.stat().st_size, path) for path in directory.glob("*.lib")])
    total = sum(size for _, size, _ in libraries)
    for _, size, path in libraries:
        if total <= BYTES_LIMIT:
            return
        path.unlink(missing_ok=True)
        total -= size
