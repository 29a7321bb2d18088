"""Checksums of responses: another server that replays a session must give the same ones."""

from __future__ import annotations

import zlib
from array import array
from typing import Final

from djinn_core.delivery.snapshots import answer_checksum
from djinn_core.wire.frames import Frame

_OPENING: Final = slice(
    1, 14
)  # of its head: the kind of message, and a submission's number; what comes after it has times in it


def mark_of(frame: Frame) -> int:
    """A checksum of what does not differ from server to server."""
    return answer_checksum(frame.body, zlib.crc32(frame.head[_OPENING]))


class Answers:
    """The answers that were taken, in order, as checksums."""

    def __init__(self) -> None:
        self._marks = array("L")

    def __len__(self) -> int:
        return len(self._marks)

    def take(self, frame: Frame) -> None:
        """One more."""
        self._marks.append(mark_of(frame))

    def agrees(self, position: int, frame: Frame) -> bool:
        """True if the answer at a position had the same checksum as `frame`."""
        return self._marks[position] == mark_of(frame)

    def clear(self) -> None:
        """They need not be given again."""
        del self._marks[:]
