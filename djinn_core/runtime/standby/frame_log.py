"""Replay log: the frames that were sent, in a file, to be sent to another server again."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from djinn_core.delivery.record_log import RecordReader, RecordWriter
from djinn_core.directories import cache_directory
from djinn_core.errors import ProtocolError, TransportError
from djinn_core.wire.frames import Frame

_FRAME: Final = b"F"  # the kind of all records
_ANSWERS: Final = struct.Struct("<Q")  # answers that had been taken; before the head of a frame


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
        self._records = RecordWriter(self._file, 0)
        self.frames = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the frames that were written."""
        return self._records.size

    @property
    def room(self) -> int:
        """Number of bytes that the disk has left."""
        return shutil.disk_usage(folder() or tempfile.gettempdir()).free

    def append(self, frame: Frame, answers: int) -> None:
        """Write a frame, before which `answers` answers had been received.

        Raises:
            OSError: there is no room.
        """
        self._records.append(_FRAME, _ANSWERS.pack(answers) + frame.head, frame.body)
        self.frames += 1

    def read(self) -> Iterator[tuple[int, Frame]]:
        """The frames in order, each with the number of answers that had been taken before it.

        Raises:
            TransportError: the file does not have what was written to it.
        """
        with open(self._file, "rb", closefd=False) as file:
            reader = RecordReader(file)
            try:
                for place in reader.places(0, self.nbytes):
                    _, head, body = reader.read(place.start)
                    (answers,) = _ANSWERS.unpack_from(head)
                    yield answers, Frame(head[_ANSWERS.size :], body)
            except (ProtocolError, struct.error) as error:
                raise TransportError(f"the file with what was sent is not what it was: {error}") from error

    def close(self) -> None:
        """Give its room back."""
        self._end()
