"""Weights in safetensors files on the server's disk, found by digest and used without a copy.

The digest of each tensor is computed from its bytes while the server starts. A tensor whose file has changed since is not found
any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import torch

from djinn_core.builtins.safetensors_files import read_header
from djinn_core.files import FileVersion, version_of
from djinn_core.logs import get_logger
from djinn_core.system.files import pread
from djinn_core.wire.digests import digest_of_content

SMALLEST: Final = 64 << 10  # bytes; clients offer nothing smaller
_log = get_logger("djinn.server")


@attrs.frozen
class _Place:
    path: Path
    start: int
    size: int
    version: FileVersion


class WeightFiles:
    """Finds tensors of safetensors files by the digest of their bytes."""

    def __init__(self) -> None:
        self._places: dict[bytes, _Place] = {}

    def add(self, path: Path) -> int:
        """Read the file; how many bytes of tensors can be found in it.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no safetensors file.
        """
        version = version_of(path)
        total = 0
        for start, size in stretches(path):
            data = _mapped(path, start, size)
            self._places[digest_of_content(data.data)] = _Place(path, start, size, version)
            total += size
        return total

    def find(self, digest: bytes, size: int) -> torch.Tensor | None:
        """The bytes of that digest (uint8, writable, private to the caller), or None if they are in no file.

        Raises:
            OSError: the file cannot be read any more.
        """
        place = self._places.get(digest)
        if place is None or place.size != size:
            return None
        if version_of(place.path) != place.version:
            _log.warning("a file with weights has changed since the server started", file=str(place.path))
            del self._places[digest]
            return None
        return torch.from_numpy(_mapped(place.path, place.start, size))


def stretches(path: Path) -> Iterator[tuple[int, int]]:
    """First byte and size of each tensor in a safetensors file that is worth finding.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no safetensors file.
    """
    with path.open("rb", buffering=0) as file:
        header = read_header(path.stat().st_size, lambda start, count: pread(file.fileno(), count, start))
    for entry in header.tensors.values():
        if entry.size >= SMALLEST:
            yield entry.start, entry.size


def _mapped(path: Path, start: int, size: int) -> Any:
    """Bytes of a file, read where they are looked at; what is written to them stays here."""
    return np.memmap(path, np.uint8, "c", start, (size,)).view(np.ndarray)
