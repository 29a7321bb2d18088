"""Append-only log of records in a file: the one writer and reader of journals and failover logs.

A record has a kind, a head and buffers. An append that fails or is interrupted is truncated; a torn record that a crash left is
skipped when reading.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from io import BufferedReader
from typing import Final

import attrs

from djinn_core.errors import ProtocolError
from djinn_core.system.files import pwrite, pwritev
from djinn_core.wire.frames import Buffer, allocate, flatten

_RECORD: Final = struct.Struct("<cIQ")  # kind, bytes of the head, bytes of all buffers; then lengths, head, buffers
_COUNT: Final = struct.Struct("<I")  # number of buffers
_NO_BUFFERS: Final = _COUNT.pack(0)
_BARE_BYTES: Final = _RECORD.size + _COUNT.size  # of a record without head and buffers
_AT_ONCE: Final = 512  # buffers that one system call writes


@attrs.frozen
class RecordLocation:
    """Location of a record in its file: offset, kind, head length and total size."""

    start: int
    kind: bytes
    head: int
    size: int


class RecordWriter:
    """Appends records to an open file, which belongs to its caller. Not thread-safe.

    Attributes:
        size: offset behind the last complete record.
    """

    def __init__(self, file: int, size: int) -> None:
        """`size`: offset of the first record."""
        self._file = file
        self.size = size

    def append(self, kind: bytes, head: bytes, body: Sequence[Buffer]) -> None:
        """Write a record.

        Raises:
            OSError: there is no room for it.
        """
        try:
            if body:
                parts = [flatten(buffer) for buffer in body]
                self.size = self._write([_opening(kind, head, parts), *parts])
            else:
                length = len(head)
                record = _RECORD.pack(kind, length, 0) + _NO_BUFFERS + head
                count = pwrite(self._file, record, self.size)  # in one call, as most records are
                self.size = self.size + count if count == _BARE_BYTES + length else self._write([record])
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise

    def _write(self, parts: list[Buffer]) -> int:
        at = self.size
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


def _opening(kind: bytes, head: bytes, parts: Sequence[Buffer]) -> bytes:
    """The header of a record, which precedes its buffers."""
    lengths = [len(part) for part in parts]
    return _RECORD.pack(kind, len(head), sum(lengths)) + struct.pack(f"<I{len(parts)}Q", len(parts), *lengths) + head


class RecordReader:
    """Reads records of a file."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file

    def places(self, start: int, end: int) -> Iterator[RecordLocation]:
        """Locations of the complete records between two positions, in order."""
        while start + _RECORD.size + _COUNT.size <= end:
            self._file.seek(start)
            kind, head, body, buffers = self._prefix()
            size = _RECORD.size + _COUNT.size + 8 * buffers + head + body
            if start + size > end:
                return
            yield RecordLocation(start, kind, head, size)
            start += size

    def head(self, start: int) -> bytes:
        """The head of the record at an offset."""
        self._file.seek(start)
        _, head, _, buffers = self._prefix()
        self._file.seek(8 * buffers, os.SEEK_CUR)
        return self._file.read(head)

    def read(self, start: int) -> tuple[bytes, bytes, list[memoryview]]:
        """The record at an offset: its kind, its head and its buffers.

        Raises:
            ProtocolError: the record contradicts itself, or the file ends in it.
        """
        self._file.seek(start)
        kind, head, body, buffers = self._prefix()
        lengths = struct.unpack(f"<{buffers}Q", self._file.read(8 * buffers))
        if sum(lengths) != body:  # a record is known to lie within the file, a buffer not yet
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
