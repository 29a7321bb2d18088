"""Read headers of weight files, and check them: files come from strangers."""

from __future__ import annotations

from typing import Final

from djinn_core.hookspecs.weight_formats import HeaderEntry
from djinn_core.hookspecs.weight_sources import WeightFile
from djinn_core.wire import limits

MOST_TENSORS: Final = limits.STORED_TENSORS
MOST_DIMENSIONS: Final = limits.DIMENSIONS
LONGEST_NAME: Final = limits.STORED_NAME
"""Limits of the description of a file that clients receive. The executor refuses a header beyond them."""


def read_bytes(file: WeightFile, start: int, size: int) -> bytes:
    """Return `size` bytes of a file from byte `start` on.

    Raises:
        OSError: the file cannot be read, or is shorter.
    """
    data = bytearray(size)
    file.read_into(start, memoryview(data))
    return bytes(data)


def refuse_overlaps(tensors: dict[str, HeaderEntry]) -> None:
    """Check that no two tensors have bytes in common.

    Raises:
        ValueError: two tensors have.
    """
    end = 0
    for name, one in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if one.start < end:
            raise ValueError(f"its tensor {name!r} overlaps another")
        end = one.start + one.size
