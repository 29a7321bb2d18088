"""Append-only record log in a file. Journals and failover logs use it.

A record has a kind, a head and buffers. An append that fails or is interrupted is truncated; the reader skips a torn
record at the end.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from typing import Final

import attrs

from djinn_core.errors import ProtocolError
from djinn_core.system.files import pwrite, pwritev
from djinn_core.wire.frames import Buffer, allocate, flatten

_RECORD: Final = struct.Struct("<cIQ")  # kind, bytes of the head, bytes of all buffers; then lengths, head, buffers
_COUNT: Final = struct.Struct("<I")  # number of buffers
_NO_BUFFERS: Final = _COUNT.pack(0)
_BARE_BYTES: Final = _RECORD.size + _COUNT.size  # bytes of a record without head and buffers
_AT_ONCE: Final = 512  # buffers per system call


@attrs.frozen
class RecordLocation:
    """Location of a record in its file: offset, kind, head length and total size."""

    start: int
    kind: bytes
    head: int
    size: int


class LazyBuffers:
    """Buffers of known sizes that are created on access, so that only one is in memory.

    Attributes:
        sizes: bytes of each buffer.
    """

    def __init__(self, sizes: Sequence[int], make: Callable[[int], Buffer]) -> None:
        """`make`: function that returns the buffer at a position."""
        self.sizes = tuple(sizes)
        self._make = make

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, position: int) -> memoryview:
        buffer = flatten(self._make(position))
        if len(buffer) != self.sizes[position]:
            raise RuntimeError(f"buffer {position} has {len(buffer):,} bytes instead of {self.sizes[position]:,}")
        return buffer

    def __iter__(self) -> Iterator[memoryview]:
        return map(self.__getitem__, range(len(self)))


Buffers = Sequence[Buffer] | LazyBuffers


def sizes_of(buffers: Buffers) -> Sequence[int]:
    """Return the bytes of each buffer."""
    return buffers.sizes if isinstance(buffers, LazyBuffers) else [memoryview(buffer).nbytes for buffer in buffers]


def record_size(head: bytes, body: Buffers) -> int:
    """Return the bytes of a record."""
    return _BARE_BYTES + len(head) + (8 * len(body) + sum(sizes_of(body)) if body else 0)


class RecordWriter:
    """Appends records to the caller's open file. Not thread-safe.

    Attributes:
        size: end of the last complete record.
    """

    def __init__(self, file: int, size: int, limit: float = math.inf) -> None:
        """`size`: offset of the first record. `limit`: bytes that the file may have; checked before a record is written."""
        self._file = file
        self._limit = limit
        self.size = size

    def append(self, kind: bytes, head: bytes, body: Buffers) -> None:
        """Write a record.

        Raises:
            OSError: the file cannot grow.
        """
        if self.size + record_size(head, body) > self._limit:
            raise OSError(errno.EFBIG, f"a log would have more than {self._limit:,} bytes")
        try:
            if isinstance(body, LazyBuffers):
                at = self._write([_opening(kind, head, body.sizes)], self.size)
                for part in body:
                    at = self._write([part], at)
                self.size = at
            elif body:
                parts = [flatten(buffer) for buffer in body]
                self.size = self._write([_opening(kind, head, list(map(len, parts))), *parts], self.size)
            else:
                length = len(head)
                record = _RECORD.pack(kind, length, 0) + _NO_BUFFERS + head
                count = pwrite(self._file, record, self.size)  # one call for most records
                self.size = self.size + count if count == _BARE_BYTES + length else self._write([record], self.size)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise

    def _write(self, parts: list[Buffer], at: int) -> int:
        for start in range(0, len(parts), _AT_ONCE):
            waiting = [memoryview(part) for part in parts[start : start + _AT_ONCE]]
            while waiting:
                count = pwritev(self._file, waiting, at)
                at += count
                while waiting and count >= len(waiting[0]):
                    count -= len(waiting.pop(0))
                if waiting:
                    waiting[0] = waiting[0][count:]
        return at


def _opening(kind: bytes, head: bytes, lengths: Sequence[int]) -> bytes:
    """Return the header of a record, which precedes its buffers."""
    counts = struct.pack(f"<I{len(lengths)}Q", len(lengths), *lengths)
    return _RECORD.pack(kind, len(head), sum(lengths)) + counts + head


class RecordReader:
    """Reads records of a file."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file

    def places(self, start: int, end: int) -> Iterator[RecordLocation]:
        """Return the locations of the complete records between two positions, in order."""
        while start + _RECORD.size + _COUNT.size <= end:
            self._file.seek(start)
            kind, head, body, buffers = self._prefix()
            size = _RECORD.size + _COUNT.size + 8 * buffers + head + body
            if start + size > end:
                return
            yield RecordLocation(start, kind, head, size)
            start += size

    def head(self, start: int) -> bytes:
        """Return the head of the record at an offset."""
        self._file.seek(start)
        _, head, _, buffers = self._prefix()
        self._file.seek(8 * buffers, os.SEEK_CUR)
        return self._file.read(head)

    def read(self, start: int) -> tuple[bytes, bytes, list[memoryview]]:
        """Return kind, head and buffers of the record at an offset.

        Raises:
            ProtocolError: the record is inconsistent or incomplete.
        """
        self._file.seek(start)
        kind, head, body, buffers = self._prefix()
        lengths = struct.unpack(f"<{buffers}Q", self._file.read(8 * buffers))
        # the caller knows that the record lies within the file; the buffer sizes are unchecked
        if sum(lengths) != body:
            raise ProtocolError("a record contradicts itself: the lengths of its buffers are not what it has")
        return kind, self._file.read(head), [self._buffer(length) for length in lengths]

    def _prefix(self) -> tuple[bytes, int, int, int]:
        kind, head, body = _RECORD.unpack(self._file.read(_RECORD.size))
        (buffers,) = _COUNT.unpack(self._file.read(_COUNT.size))
        return kind, head, body, buffers

    def _buffer(self, length: int) -> memoryview:
        view = allocate(length)
        done = 0
        while done < length:
            count = self._file.readinto(view[done:])
            if not count:
                raise ProtocolError("a log ends in the middle of a record")
            done += count
        return view
