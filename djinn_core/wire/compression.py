"""Compression of tensor data: byte planes one after the other (byte shuffle), then zstd.

The bytes of floating-point numbers hardly repeat, but their exponents do, once they lie side by side. Needs the package
`zstandard` at both ends.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

import numpy as np

from djinn_core.errors import ProtocolError
from djinn_core.wire.frames import Buffer, allocate, flatten

PLANES_ZSTD: Final = "planes+zstd"
LARGEST: Final = 64 << 20  # bytes that may come out of one buffer
_LEVEL: Final = 1  # higher ones take twice the time and more, and make weights no smaller


def supported_compressions() -> tuple[str, ...]:
    """The compressions that this process can write and read; none without the package `zstandard`."""
    return (PLANES_ZSTD,) if importlib.util.find_spec("zstandard") is not None else ()


def compressed(data: Buffer, item: int) -> bytes:
    """`data`, which consists of elements of `item` bytes, compressed; slightly larger if it is incompressible."""
    octets = np.frombuffer(data, np.uint8)
    planes = np.ascontiguousarray(octets.reshape(-1, item).T) if item > 1 else octets
    written: bytes = _zstandard().ZstdCompressor(level=_LEVEL).compress(planes)
    return written


def expanded(data: Buffer, compression: str, item: int, length: int) -> memoryview:
    """Decompress `data` to exactly `length` bytes. Never allocates more than that, whatever `data` announces.

    Raises:
        ProtocolError: the compression is unknown here, or something else than `length` bytes comes out.
    """
    if compression not in supported_compressions():
        raise ProtocolError(f"data has the compression {compression[:64]!r}, which this end cannot read")
    if length > LARGEST or length % item:
        raise ProtocolError(f"{length:,} bytes do not come in one buffer of elements of {item} bytes")
    planes = allocate(length)
    _fill(planes, flatten(data))
    if item == 1:
        return planes
    whole = allocate(length)
    np.frombuffer(whole, np.uint8).reshape(-1, item)[:] = np.frombuffer(planes, np.uint8).reshape(item, -1).T
    return whole


def _fill(target: memoryview, data: memoryview) -> None:
    """Expand `data` into `target`, which it must fill exactly."""
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
