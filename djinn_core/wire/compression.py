"""Compression of tensor data: byte shuffle (all first bytes, then all second bytes, ...), then zstd.

The bytes of floating-point numbers rarely repeat, but their exponents do once they are adjacent. Both ends need the
package `zstandard`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

import numpy as np

from djinn_core.errors import ProtocolError
from djinn_core.wire.frames import Buffer, allocate, flatten

PLANES_ZSTD: Final = "planes+zstd"
LARGEST: Final = 64 << 20  # limit in bytes of one decompressed buffer
_LEVEL: Final = 1  # higher levels take at least twice the time, and do not make weights smaller


def supported_compressions() -> tuple[str, ...]:
    """Return the compressions that this process supports; empty without the package `zstandard`."""
    return (PLANES_ZSTD,) if importlib.util.find_spec("zstandard") is not None else ()


def compressed(data: Buffer, item: int) -> bytes:
    """Compress `data`, which consists of elements of `item` bytes. Incompressible data becomes slightly larger."""
    octets = np.frombuffer(data, np.uint8)
    planes = np.ascontiguousarray(octets.reshape(-1, item).T) if item > 1 else octets
    compressed_bytes: bytes = _zstandard().ZstdCompressor(level=_LEVEL).compress(planes)
    return compressed_bytes


def expanded(data: Buffer, compression: str, item: int, length: int) -> memoryview:
    """Decompress `data` to exactly `length` bytes. Never allocate more, even if `data` announces more.

    Raises:
        ProtocolError: the compression is unknown, or the result does not have `length` bytes.
    """
    if compression not in supported_compressions():
        raise ProtocolError(f"the data has the compression {compression[:64]!r}, which this end cannot read")
    if length > LARGEST or length % item:
        raise ProtocolError(f"{length:,} bytes cannot be one buffer of elements of {item} bytes")
    planes = allocate(length)
    _fill(planes, flatten(data))
    if item == 1:
        return planes
    whole = allocate(length)
    np.frombuffer(whole, np.uint8).reshape(-1, item)[:] = np.frombuffer(planes, np.uint8).reshape(item, -1).T
    return whole


def _fill(target: memoryview, data: memoryview) -> None:
    zstandard = _zstandard()
    reader = zstandard.ZstdDecompressor(max_window_size=LARGEST).stream_reader(data)
    filled = 0
    try:
        while filled < len(target):
            count = reader.readinto(target[filled:])
            if not count:
                raise ProtocolError(f"compressed data ends after {filled:,} of {len(target):,} bytes")
            filled += count
        if reader.read(1):
            raise ProtocolError(f"compressed data is more than the {len(target):,} bytes that were announced")
    except zstandard.ZstdError as error:
        raise ProtocolError(f"compressed data cannot be read: {error}") from error


def _zstandard() -> Any:
    return importlib.import_module("zstandard")
