"""Read and check the headers of weight files, which are not trusted."""

from __future__ import annotations

import math
from typing import Final

from djinn_core.wire import limits
from djinn_server.hookspecs.weight_formats import FileHeader, HeaderEntry
from djinn_server.hookspecs.weight_sources import WeightFile

MAX_TENSORS: Final = limits.STORED_TENSORS
MAX_DIMENSIONS: Final = limits.DIMENSIONS
MAX_NAME_LENGTH: Final = limits.STORED_NAME
"""Maximum number of tensors, of dimensions of a tensor, and of characters of a name. Headers beyond them are refused."""


_MAX_BYTES: Final = 128 << 20  # maximum bytes of one read: a safetensors header has at most 100 MiB


def read_bytes(file: WeightFile, start: int, size: int) -> bytes:
    """Return `size` bytes of a file, beginning at byte `start`. Both numbers may come from an untrusted header.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is shorter, or `size` is larger than any valid header.
    """
    if not (start >= 0 and 0 <= size <= min(_MAX_BYTES, file.size - start)):
        raise ValueError(f"the header refers to {size:,} bytes at byte {start:,}, but the file has {file.size:,} bytes")
    data = bytearray(size)
    file.read_into(start, memoryview(data))
    return bytes(data)


def check_header(file: WeightFile, header: FileHeader) -> None:
    """Check that each tensor lies in the file and has the size of its shape.

    Raises:
        ValueError: a tensor exceeds the file or has another size.
    """
    for name, entry in header.tensors.items():
        if len(entry.shape) > MAX_DIMENSIONS or min(entry.shape, default=0) < 0:
            raise ValueError(f"the tensor {name[:200]!r} has a negative size, or more than {MAX_DIMENSIONS} dimensions")
        if entry.dtype is None:
            continue
        if entry.size != math.prod(entry.shape) * entry.dtype.itemsize:
            raise ValueError(f"the shape of the tensor {name[:200]!r} does not fit its {entry.size} bytes")
        if entry.decoding is None and not 0 <= entry.start <= file.size - entry.size:
            raise ValueError(f"the tensor {name[:200]!r} extends beyond the end of the file")


def refuse_overlaps(tensors: dict[str, HeaderEntry]) -> None:
    """Check that no two tensors overlap.

    Raises:
        ValueError: two tensors overlap.
    """
    end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start < end:
            raise ValueError(f"the tensor {name!r} overlaps another tensor of the file")
        end = entry.start + entry.size
