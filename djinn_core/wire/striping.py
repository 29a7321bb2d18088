"""Striped frames: large buffers are sent in pieces over parallel connections. Without I/O.

A piece is a frame of its own. Its head has the number of the striped frame, from 1 in each direction, and the piece's
number in it. Its body has the bytes. Pieces of a frame may arrive in any order and over any connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

from djinn_core.errors import ProtocolError
from djinn_core.wire.frames import LENGTH_BYTES, PREFIX_BYTES, Buffer, Frame, Limits, StripedFrame, allocate

PIECE_BYTES: Final = 1 << 20
_HEAD: Final = struct.Struct("<QI")
PIECE_OPENING_BYTES: Final = PREFIX_BYTES + _HEAD.size + LENGTH_BYTES  # header before the bytes of a piece
PIECE_LIMITS: Final = Limits(_HEAD.size, PIECE_BYTES, 1)


def cut(buffer: memoryview) -> Iterator[memoryview]:
    """Yield the pieces of one buffer, in order."""
    for start in range(0, len(buffer), PIECE_BYTES):
        yield buffer[start : start + PIECE_BYTES]


def pieces(number: int, buffers: Sequence[memoryview]) -> Iterator[Frame]:
    """Yield the pieces of the large buffers of striped frame `number`."""
    all_pieces = (piece for buffer in buffers for piece in cut(buffer))
    for position, piece in enumerate(all_pieces):
        yield Frame(_HEAD.pack(number, position), [piece])


class Reassembly:
    """Assemble a striped frame from its pieces. Each piece must arrive exactly once, so all buffer bytes get written.

    Attributes:
        number: number of the striped frame in its direction.
    """

    def __init__(self, number: int, striped: StripedFrame) -> None:
        """Allocate the buffers.

        Raises:
            MemoryError: memory is short.
        """
        self.number = number
        self._head = striped.head
        self._body = [allocate(part) if isinstance(part, int) else part for part in striped.body]
        large = [view for view, part in zip(self._body, striped.body, strict=True) if isinstance(part, int)]
        self._places = dict(enumerate(piece for buffer in large for piece in cut(buffer)))
        self._coming: dict[int, memoryview] = {}
        self._missing = len(self._places)

    @property
    def whole(self) -> bool:
        """True if all pieces have arrived."""
        return not self._missing

    @property
    def frame(self) -> Frame:
        """The complete frame."""
        return Frame(self._head, self._body)

    def place(self, head: bytes, length: int) -> memoryview | None:
        """Return the memory that receives a piece of this frame, or None for a piece of a later frame.

        Raises:
            ProtocolError: the piece has arrived already, or its number or length is wrong.
        """
        number, position = piece_of(head)
        if number > self.number:
            return None
        view = self._places.pop(position, None) if number == self.number else None
        if view is None or len(view) != length:
            raise ProtocolError(
                f"piece {position} of the striped frame {number}, with {length:,} bytes, is not missing"
            )
        self._coming[position] = view
        return view

    def take(self, piece: Frame) -> None:
        """Record a piece that has arrived. Its bytes may be in the memory from `place` or in the frame.

        Raises:
            ProtocolError: the piece has arrived already, or its number or length is wrong.
        """
        data: Buffer = piece.body[0] if piece.body else b""
        position = piece_of(piece.head)[1]
        view = self._coming.pop(position, None)
        if view is None or view is not data:
            if view is not None:
                raise ProtocolError(f"piece {position} of a striped frame arrived twice")
            place = self.place(piece.head, len(data))
            if place is None:
                raise ProtocolError(f"a piece of a striped frame arrived out of order, after frame {self.number}")
            place[:] = data
            del self._coming[position]
        self._missing -= 1


def piece_of(head: bytes) -> tuple[int, int]:
    """Return the number of a piece's frame and the number of the piece.

    Raises:
        ProtocolError: the head does not belong to a piece.
    """
    if len(head) != _HEAD.size:
        raise ProtocolError(f"a frame with a head of {len(head):,} bytes is not a piece of a striped frame")
    number, position = _HEAD.unpack(head)
    return number, position
