"""Replay log: the frames that were sent, in a file, to be sent to another server again."""

from __future__ import annotations

import os
import struct
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from djinn_core.directories import cache_directory
from djinn_core.errors import TransportError
from djinn_core.wire.frames import Buffer, Frame, allocate, flatten

_RECORD: Final = struct.Struct(
    "<QII"
)  # answers that had been taken, bytes of the head, buffers; then lengths, head, buffers
_AT_ONCE: Final = 512  # buffers that one system call writes


def folder() -> Path | None:
    """Directory of such files: in the user's cache, on a disk as a rule; None: the system's default."""
    path = cache_directory()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return path


class SentFrames:
    """Frames in a file without a name, which is gone with this process, however it ends. Used by one thread at a time."""

    def __init__(self) -> None:
        """Make an empty one.

        Raises:
            OSError: there cannot be one.
        """
        with tempfile.TemporaryFile(dir=folder(), buffering=0) as file:
            self._file = os.dup(file.fileno())
        self._end = weakref.finalize(self, os.close, self._file)
        self.nbytes = 0
        self.frames = 0

    @property
    def room(self) -> int:
        """Number of bytes that the disk has left."""
        found = os.fstatvfs(self._file)
        return found.f_bavail * found.f_frsize

    def append(self, frame: Frame, answers: int) -> None:
        """Write a frame, before which so many answers had been taken.

        Raises:
            OSError: there is no room.
        """
        parts = [flatten(buffer) for buffer in frame.body]
        lengths = struct.pack(f"<{len(parts)}Q", *[len(part) for part in parts])
        opening = _RECORD.pack(answers, len(frame.head), len(parts)) + lengths + frame.head
        end = self._write([opening, *[part for part in parts if len(part)]], self.nbytes)
        self.nbytes = end  # only now: what an interrupt or an error has left is written over
        self.frames += 1

    def _write(self, parts: list[Buffer], at: int) -> int:
        for start in range(0, len(parts), _AT_ONCE):
            waiting = [memoryview(part) for part in parts[start : start + _AT_ONCE]]
            while waiting:
                count = os.pwritev(self._file, waiting, at)
                at += count
                while waiting and count >= len(waiting[0]):
                    count -= len(waiting.pop(0))
                if waiting:
                    waiting[0] = waiting[0][count:]
        return at

    def read(self) -> Iterator[tuple[int, Frame]]:
        """The frames in order, each with the number of answers that had been taken before it.

        Raises:
            TransportError: the file does not have what was written to it.
        """
        at = 0
        while at < self.nbytes:
            answers, head, buffers = _RECORD.unpack(self._read(_RECORD.size, at))
            at += _RECORD.size
            lengths = struct.unpack(f"<{buffers}Q", self._read(8 * buffers, at))
            at += 8 * buffers
            body: list[Buffer] = []
            opening = bytes(self._read(head, at))
            at += head
            for length in lengths:
                body.append(self._read(length, at))
                at += length
            yield answers, Frame(opening, body)

    def _read(self, length: int, at: int) -> memoryview:
        view = allocate(length) if length else memoryview(b"")
        done = 0
        while done < length:
            count = os.preadv(self._file, [view[done:]], at + done)
            if not count:
                raise TransportError("the file with what was sent is shorter than it was")
            done += count
        return view

    def close(self) -> None:
        """Give its room back."""
        self._end()
