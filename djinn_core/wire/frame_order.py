"""Sequence numbers, retransmission buffers and acknowledgements of frames, without I/O: exactly-once delivery.

Every frame carries its number and how many frames of the other end were received, as a prefix of its head. A frame is kept
until the other end has acknowledged it. A frame with nothing behind the prefix is a *note*: it has no number of its own and
acknowledges frames. Both counts wrap at 2^32; fewer than 2^31 frames are under way at a time.

The rules are those of go-back-n: frames are received in order of their numbers, and repeated ones are dropped. Where one is
missing, what follows is dropped and asked for again (Tanenbaum, Computer Networks, 3.4.2).
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from djinn_core.errors import ProtocolError
from djinn_core.wire.frames import Frame, flatten

_PREFIX: Final = struct.Struct("<IIB")
pack_prefix: Final = _PREFIX.pack
unpack_prefix: Final = _PREFIX.unpack_from
PREFIX_BYTES: Final = _PREFIX.size
_ASKED: Final = struct.Struct("<I")
COUNT_MASK: Final = (1 << 32) - 1  # counts of frames wrap here
_HALF: Final = 1 << 31
KEPT_LIMIT: Final = 1 << 16  # frames that may wait to be received
COPIED_AT_ONCE: Final = 4096  # bytes of a body that are not worth borrowing


class AckFlags(enum.IntFlag):
    """Flags of a note: requests to the other end."""

    NOTHING = 0
    ACK_REQUEST = 1
    """Request an acknowledgement."""
    RETRANSMIT = 2
    """Retransmit what was not received."""
    ACK_REPLY = 4
    """The reply to a request: everything that was sent before it was received or lost."""


_REPLY_BIT: Final = int(AckFlags.ACK_REPLY)
_WISHES: Final = tuple(AckFlags(bits) for bits in range(8))  # by their bits: looked up, as every frame has one
_WISHES_COUNT: Final = len(_WISHES)


class FrameOrder(enum.Enum):
    """Classification of a numbered frame by its receiver."""

    NEXT = enum.auto()
    REPEATED = enum.auto()
    AHEAD = enum.auto()


class Prefix(msgspec.Struct, frozen=True):
    """Prefix of a frame's head.

    Attributes:
        number: of this frame; of a note, of the last frame that was sent before it.
        received: number of frames that were received from the other end.
        wish: the flags of a note.
        asked: of a reply, the number of the note that it answers: several may be under way if the other end is slow.
    """

    number: int
    received: int
    wish: AckFlags = AckFlags.NOTHING
    asked: int = 0

    def encode(self) -> bytes:
        """Nine bytes, and four more for a reply."""
        asked = _ASKED.pack(self.asked) if self.wish & AckFlags.ACK_REPLY else b""
        return _PREFIX.pack(self.number, self.received, self.wish) + asked


def split(frame: Frame) -> tuple[Prefix, bytes]:
    """The prefix of a frame, and its head without it (empty: it is a note).

    Raises:
        ProtocolError: there is none.
    """
    try:
        number, received, wish = _PREFIX.unpack_from(frame.head)
    except struct.error:
        raise ProtocolError(f"a frame of {len(frame.head)} bytes has no number") from None
    if wish >= _WISHES_COUNT:
        raise ProtocolError(f"a frame wishes for something unknown: {wish}")
    head = frame.head[PREFIX_BYTES:]
    asked = 0
    if wish & _REPLY_BIT:
        if len(head) != _ASKED.size:
            raise ProtocolError("a reply does not say what it answers")
        (asked,), head = _ASKED.unpack(head), b""
    if not head and frame.body:
        raise ProtocolError("a note has a body")
    return Prefix(number, received, _WISHES[wish], asked), head


class _UnacknowledgedFrame(msgspec.Struct):
    frame: Frame
    nbytes: int
    borrowed: bool


def body_bytes(frame: Frame) -> int:
    """Bytes of a frame's body."""
    nbytes = 0
    for buffer in frame.body:  # mostly none or one: no generator for it
        nbytes += memoryview(buffer).nbytes
    return nbytes


class Outbox:
    """Sending side: frames that were numbered and not yet acknowledged by the other end.

    Attributes:
        borrows: True if some of the kept bodies refer to memory that the caller owns.
        ahead: during a replay, the number of frames that the other end has received from an earlier process: what is put then was
            acknowledged before. None otherwise.
    """

    def __init__(self) -> None:
        self._kept: deque[_UnacknowledgedFrame] = deque()
        self._sent = 0
        self.borrows = False
        self.ahead: int | None = None

    @property
    def sent(self) -> int:
        """Number of frames that were numbered, modulo 2^32."""
        return self._sent & COUNT_MASK

    def put(self, frame: Frame) -> int:
        """Keep a frame until it is acknowledged; returns its number. Its body is borrowed until `own`, unless it is small.

        Raises:
            ProtocolError: the other end acknowledges nothing.
        """
        if len(self._kept) >= KEPT_LIMIT:
            raise ProtocolError(f"the other end has not received one of {KEPT_LIMIT:,} frames")
        self._sent += 1
        if self.ahead is not None and (self.ahead - self._sent) & COUNT_MASK < _HALF:
            return self.sent
        self.ahead = None
        nbytes, borrowed, own = 0, False, True
        for buffer in frame.body:  # mostly none or one: no generator for it
            nbytes += memoryview(buffer).nbytes
            own = own and type(buffer) is bytes
        if nbytes > COPIED_AT_ONCE:
            borrowed = self.borrows = True
        elif not own:
            frame = _copied(frame)
        self._kept.append(_UnacknowledgedFrame(frame, nbytes, borrowed))
        return self._sent & COUNT_MASK

    def restore(self, sent: int, kept: Sequence[Frame]) -> None:
        """Continue after another process that sent `sent` frames, the last ones of which, `kept`, were not acknowledged."""
        self._sent = sent
        self._kept = deque(_UnacknowledgedFrame(frame, body_bytes(frame), borrowed=False) for frame in kept)

    def repeat(self, received: int) -> None:
        """Begin a replay: frames up to number `received` were already received by the peer and are neither kept nor sent again."""
        if 0 < (received - self._sent) & COUNT_MASK < _HALF:
            self._kept.clear()
            self.ahead = received
        else:
            self.acknowledge(received)

    def acknowledge(self, received: int) -> None:
        """Drop the frames up to number `received`, which the other end has.

        Raises:
            ProtocolError: it cannot have received that many.
        """
        if self.ahead is not None:
            self.ahead = received
            return
        waiting = (self._sent - received) & COUNT_MASK
        kept = self._kept
        over = len(kept) - waiting
        if over < 0:
            if waiting < _HALF:
                return  # an old acknowledgement arrived late
            raise ProtocolError(f"the other end has received {received} frames of {self.sent} that were sent")
        for _ in range(over):
            kept.popleft()
        if not waiting:
            self.borrows = False

    def copy_borrowed(self) -> None:
        """Copy what is kept and was borrowed, because its memory is about to change."""
        if self.borrows:
            for kept in self._kept:
                if kept.borrowed:
                    kept.frame, kept.borrowed = _copied(kept.frame), False
            self.borrows = False

    def kept(self) -> list[tuple[int, Frame]]:
        """Frames that were not received yet, with their numbers, oldest first."""
        first = self._sent - len(self._kept) + 1
        return [((first + i) & COUNT_MASK, kept.frame) for i, kept in enumerate(self._kept)]

    @property
    def acknowledged(self) -> int:
        """Number of frames that the other end has acknowledged, modulo 2^32."""
        return (self._sent - len(self._kept)) & COUNT_MASK

    def lost(self, received: int) -> int:
        """Number of frames that the other end has acknowledged, and that are not among the `received` ones that it has now."""
        lost = (self.acknowledged - received) & COUNT_MASK
        return lost if lost < _HALF else 0

    @staticmethod
    def sent_after(received: int, sent: int) -> bool:
        """True if `sent` is after `received`; both are counts modulo 2^32."""
        return 0 < (sent - received) & COUNT_MASK < _HALF

    @property
    def empty(self) -> bool:
        """True if every frame was acknowledged."""
        return not self._kept

    @property
    def nbytes(self) -> int:
        """Bytes of the bodies that are kept."""
        return sum(kept.nbytes for kept in tuple(self._kept))  # the thread that reads may take some away meanwhile


def _copied(frame: Frame) -> Frame:
    return Frame(frame.head, [bytes(flatten(buffer)) for buffer in frame.body])


class Inbox:
    """Receiving side: counts the frames that were received from the other end.

    Attributes:
        received: their number, modulo 2^32.
    """

    def __init__(self) -> None:
        self.received = 0

    def judge(self, number: int) -> FrameOrder:
        """Classify a frame of this number."""
        ahead = (number - self.received - 1) & COUNT_MASK
        if not ahead:
            return FrameOrder.NEXT
        return FrameOrder.AHEAD if ahead < _HALF else FrameOrder.REPEATED

    def take(self, frames: int = 1) -> None:
        """Count `frames` as received."""
        self.received = (self.received + frames) & COUNT_MASK

    def misses(self, sent: int) -> bool:
        """True if some of the `sent` frames of the peer were not received."""
        return 0 < (sent - self.received) & COUNT_MASK < _HALF
