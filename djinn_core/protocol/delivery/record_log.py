"""Append-only record log in a file. Journals and failover logs use it.

A record has a kind, a head and buffers. An append that fails or is interrupted is truncated; the reader skips a torn
record at the end. It refuses a damaged record: checksums cover the lengths, the head and the buffers.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader
from typing import Final, NamedTuple

import attrs

from djinn_core.errors import ProtocolError
from djinn_core.system.files import pwrite, pwritev
from djinn_core.wire.digests import ContentHash
from djinn_core.wire.frames import Buffer, allocate, flatten

# Of each record: kind, bytes of the head, bytes and number of the buffers, checksum of lengths and head, checksum of these fields.
# Lengths of the buffers, head, buffers and, if there are buffers, their checksum follow.
_FIELDS: Final = struct.Struct("<cIQII")
_SUM: Final = struct.Struct("<I")
_BARE_BYTES: Final = _FIELDS.size + _SUM.size  # bytes of a record without head and buffers
_BODY_SUM: Final = 8  # bytes of the checksum of the buffers
_pack_fields, _pack_sum, _crc32 = _FIELDS.pack, _SUM.pack, zlib.crc32
_BUFFERS_PER_WRITE: Final = 512  # buffers per system call


@attrs.frozen
class RecordLocation:
    """Location of a record in its file: offset, kind, head length and total size."""

    start: int
    kind: bytes
    head: int
    size: int


class LazyBuffers:
    """Buffers of known sizes that are created on access, so that only one buffer is in memory.

    Attributes:
        sizes: bytes of each buffer.
    """

    def __init__(self, sizes: Sequence[int], make: Callable[[int], Buffer]) -> None:
        """Create the sequence. `make` returns the buffer at an index."""
        self.sizes = tuple(sizes)
        self._make = make

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> memoryview:
        buffer = flatten(self._make(index))
        if len(buffer) != self.sizes[index]:
            raise RuntimeError(f"buffer {index} has {len(buffer):,} bytes instead of {self.sizes[index]:,}")
        return buffer

    def __iter__(self) -> Iterator[memoryview]:
        return map(self.__getitem__, range(len(self)))


Buffers = Sequence[Buffer] | LazyBuffers


def sizes_of(buffers: Buffers) -> Sequence[int]:
    """Return the bytes of each buffer."""
    return buffers.sizes if isinstance(buffers, LazyBuffers) else [memoryview(buffer).nbytes for buffer in buffers]


def record_size(head: bytes, body: Buffers) -> int:
    """Return the bytes of a record."""
    if not body:
        return _BARE_BYTES + len(head)
    return _BARE_BYTES + len(head) + 8 * len(body) + sum(sizes_of(body)) + _BODY_SUM


def body_checksum(buffers: Iterable[Buffer]) -> bytes:
    """Return the checksum of buffers. For large buffers, BLAKE3 takes a third of CRC-32's time."""
    checksum = ContentHash()
    for buffer in buffers:
        checksum.update(buffer)
    return checksum.digest(_BODY_SUM)


class RecordWriter:
    """Append records to the caller's open file. Not thread-safe.

    Attributes:
        size: file offset at which the last complete record ends.
    """

    def __init__(self, file: int, size: int, limit: float = math.inf) -> None:
        """Append from the file offset `size` on, at which the last complete record ends.

        `limit` is the maximum size of the file in bytes. It is checked before a record is written.
        """
        self._file = file
        self._limit = limit
        self.size = size

    def append(self, kind: bytes, head: bytes, body: Buffers) -> None:
        """Write a record.

        Raises:
            OSError: the file cannot grow.
        """
        if self._limit != math.inf and self.size + record_size(head, body) > self._limit:
            raise OSError(errno.EFBIG, f"a record log would exceed its limit of {self._limit:,} bytes")
        try:
            if not body:
                fields = _pack_fields(kind, len(head), 0, 0, _crc32(head))
                record = b"".join((fields, _pack_sum(_crc32(fields)), head))
                count = pwrite(self._file, record, self.size)  # one call for most records
                self.size = self.size + count if count == len(record) else self._write([record], self.size)
            elif isinstance(body, LazyBuffers):
                at, checksum = self._write([_header(kind, head, body.sizes)], self.size), ContentHash()
                for part in body:
                    checksum.update(part)
                    at = self._write([part], at)
                self.size = self._write([checksum.digest(_BODY_SUM)], at)
            else:
                parts = [flatten(buffer) for buffer in body]
                header = _header(kind, head, list(map(len, parts)))
                self.size = self._write([header, *parts, body_checksum(parts)], self.size)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise

    def _write(self, parts: list[Buffer], at: int) -> int:
        for start in range(0, len(parts), _BUFFERS_PER_WRITE):
            unwritten = [memoryview(part) for part in parts[start : start + _BUFFERS_PER_WRITE]]
            while unwritten:
                count = pwritev(self._file, unwritten, at)
                at += count
                while unwritten and count >= len(unwritten[0]):
                    count -= len(unwritten.pop(0))
                if unwritten:
                    unwritten[0] = unwritten[0][count:]
        return at


def _header(kind: bytes, head: bytes, lengths: Sequence[int]) -> bytes:
    """Return the header of a record, which precedes its buffers."""
    rest = struct.pack(f"<{len(lengths)}Q", *lengths) + head if lengths else head
    fields = _FIELDS.pack(kind, len(head), sum(lengths), len(lengths), zlib.crc32(rest))
    return fields + _SUM.pack(zlib.crc32(fields)) + rest


class _Header(NamedTuple):
    """Fields of a record before its buffers.

    Attributes:
        lengths: bytes of each buffer.
    """

    kind: bytes
    head: bytes
    lengths: tuple[int, ...]


class RecordReader:
    """Read records of a file."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file

    def locations(self, start: int, end: int) -> Iterator[RecordLocation]:
        """Yield the locations of the complete records between two file offsets, in order.

        Raises:
            ProtocolError: the lengths of a record are damaged.
        """
        while start + _BARE_BYTES <= end:
            self._file.seek(start)
            kind, head, body, buffers, _ = self._read_fields()
            size = _BARE_BYTES + 8 * buffers + head + body + (_BODY_SUM if buffers else 0)
            if start + size > end:
                return
            yield RecordLocation(start, kind, head, size)
            start += size

    def head(self, start: int) -> bytes:
        """Return the head of the record at an offset.

        Raises:
            ProtocolError: the record is damaged, or the file ends in it.
        """
        return self._read_header(start).head

    def read(self, start: int) -> tuple[bytes, bytes, list[memoryview]]:
        """Return kind, head and buffers of the record at an offset.

        Raises:
            ProtocolError: the record is damaged, or the file ends in it.
        """
        kind, head, lengths = self._read_header(start)
        buffers = [self._read_buffer(length) for length in lengths]
        if buffers and self._file.read(_BODY_SUM) != body_checksum(buffers):
            raise _damaged_record_error(start)
        return kind, head, buffers

    def _read_header(self, start: int) -> _Header:
        self._file.seek(start)
        kind, head, body, buffers, checksum = self._read_fields()
        rest = self._file.read(8 * buffers + head)
        if len(rest) < 8 * buffers + head or zlib.crc32(rest) != checksum:
            raise _damaged_record_error(start)
        lengths = struct.unpack_from(f"<{buffers}Q", rest)
        if sum(lengths) != body:
            raise _damaged_record_error(start)
        return _Header(kind, rest[8 * buffers :], lengths)

    def _read_fields(self) -> tuple[bytes, int, int, int, int]:
        start = self._file.tell()
        fields, checksum = self._file.read(_FIELDS.size), self._file.read(_SUM.size)
        if len(checksum) < _SUM.size or _SUM.pack(zlib.crc32(fields)) != checksum:
            raise _damaged_record_error(start)
        kind, head, body, buffers, rest = _FIELDS.unpack(fields)
        return kind, head, body, buffers, rest

    def _read_buffer(self, length: int) -> memoryview:
        view = allocate(length)
        filled = 0
        while filled < length:
            count = self._file.readinto(view[filled:])
            if not count:
                raise ProtocolError(
                    f"a record log is truncated: it ends at byte {self._file.tell():,}, within a record"
                )
            filled += count
        return view


def _damaged_record_error(start: int) -> ProtocolError:
    return ProtocolError(f"the record at offset {start:,} is damaged: its checksum differs, as after a disk failure")
