"""Sequence numbers, retransmission buffers and acknowledgements of frames, without I/O: exactly-once delivery.

The head of every frame begins with a prefix: the frame's number, and the number of frames received from the other end.
A frame is kept until the other end acknowledges it. A frame with an empty rest is a *note*: it acknowledges frames and
has no number of its own. Both counts wrap at 2^32; fewer than 2^31 frames are in flight.

The protocol is go-back-n: frames are received in order, and repeated frames are dropped. If a frame is missing, all
later frames are dropped and requested again (Tanenbaum, Computer Networks, 3.4.2).
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
COUNT_MASK: Final = (1 << 32) - 1  # modulus of frame counts
_HALF: Final = 1 << 31
KEPT_LIMIT: Final = 1 << 16  # limit of unacknowledged frames
COPIED_AT_ONCE: Final = 4096  # smaller bodies are copied instead of borrowed


class AckFlags(enum.IntFlag):
    """Flags of a note: requests to the other end."""

    NOTHING = 0
    ACK_REQUEST = 1
    """Request an acknowledgement."""
    RETRANSMIT = 2
    """Retransmit frames that were not received."""
    ACK_REPLY = 4
    """The reply to a request: all frames that were sent before the request have been received or lost."""


_REPLY_BIT: Final = int(AckFlags.ACK_REPLY)
_WISHES: Final = tuple(AckFlags(bits) for bits in range(8))  # lookup table by bits, because every frame has flags
_WISHES_COUNT: Final = len(_WISHES)


class FrameOrder(enum.Enum):
    """How a receiver classifies a numbered frame."""

    NEXT = enum.auto()
    REPEATED = enum.auto()
    AHEAD = enum.auto()


class Prefix(msgspec.Struct, frozen=True):
    """Prefix of a frame's head.

    Attributes:
        number: number of this frame. A note has the number of the last frame that was sent before it.
        received: number of frames that were received from the other end.
        wish: what a note requests; `NOTHING` for other frames.
        asked: number of the note that a reply answers, because several notes may be in flight.
    """

    number: int
    received: int
    wish: AckFlags = AckFlags.NOTHING
    asked: int = 0

    def encode(self) -> bytes:
        """Return the encoded prefix: nine bytes, or thirteen for a reply."""
        ask_bytes = _ASKED.pack(self.asked) if self.wish & AckFlags.ACK_REPLY else b""
        return _PREFIX.pack(self.number, self.received, self.wish) + ask_bytes


def split(frame: Frame) -> tuple[Prefix, bytes]:
    """Split a frame into its prefix and the rest of its head. The rest of a note is empty.

    Raises:
        ProtocolError: the frame has no valid prefix.
    """
    try:
        number, received, wish = _PREFIX.unpack_from(frame.head)
    except struct.error:
        raise ProtocolError(f"a frame of {len(frame.head)} bytes has no number") from None
    if wish >= _WISHES_COUNT:
        raise ProtocolError(f"a frame has unknown flags: {wish}")
    head = frame.head[PREFIX_BYTES:]
    ask_number = 0
    if wish & _REPLY_BIT:
        if len(head) != _ASKED.size:
            raise ProtocolError("a reply lacks the number of its note")
        (ask_number,), head = _ASKED.unpack(head), b""
    if not head and frame.body:
        raise ProtocolError("a note has a body")
    return Prefix(number, received, _WISHES[wish], ask_number), head


class _UnacknowledgedFrame(msgspec.Struct):
    frame: Frame
    nbytes: int
    borrowed: bool


def body_bytes(frame: Frame) -> int:
    """Return the bytes of a frame's body."""
    nbytes = 0
    for buffer in frame.body:  # usually at most one buffer, so avoid a generator
        nbytes += memoryview(buffer).nbytes
    return nbytes


class Outbox:
    """Sending side: numbered frames that the other end has not acknowledged.

    Attributes:
        borrows: True if bodies of unacknowledged frames refer to memory that the caller owns.
        ahead: during a replay, the number of frames that the other end has received from an earlier process. New frames
            up to this number count as acknowledged. None if there is no replay.
    """

    def __init__(self) -> None:
        self._kept: deque[_UnacknowledgedFrame] = deque()
        self._sent = 0
        self.borrows = False
        self.ahead: int | None = None

    @property
    def sent(self) -> int:
        """Number of numbered frames, modulo 2^32."""
        return self._sent & COUNT_MASK

    def put(self, frame: Frame) -> int:
        """Keep a frame until it is acknowledged, and return its number.

        A large body is borrowed until `copy_borrowed`.

        Raises:
            ProtocolError: `KEPT_LIMIT` frames are unacknowledged.
        """
        if len(self._kept) >= KEPT_LIMIT:
            raise ProtocolError(f"the peer has acknowledged none of the last {KEPT_LIMIT:,} frames")
        self._sent += 1
        if self.ahead is not None and (self.ahead - self._sent) & COUNT_MASK < _HALF:
            return self.sent
        self.ahead = None
        nbytes, borrowed, immutable = 0, False, True
        for buffer in frame.body:  # usually at most one buffer, so avoid a generator
            nbytes += memoryview(buffer).nbytes
            immutable = immutable and type(buffer) is bytes
        if nbytes > COPIED_AT_ONCE:
            borrowed = self.borrows = True
        elif not immutable:
            frame = _copied(frame)
        self._kept.append(_UnacknowledgedFrame(frame, nbytes, borrowed))
        return self._sent & COUNT_MASK

    def restore(self, sent_count: int, unacknowledged: Sequence[Frame]) -> None:
        """Continue after an earlier process that sent `sent_count` frames.

        `unacknowledged`: frames that the peer has not acknowledged, oldest first.
        """
        self._sent = sent_count
        self._kept = deque(_UnacknowledgedFrame(frame, body_bytes(frame), borrowed=False) for frame in unacknowledged)

    def repeat(self, received: int) -> None:
        """Begin a replay.

        Frames up to number `received` reached the peer before, and are neither kept nor sent again.
        """
        if 0 < (received - self._sent) & COUNT_MASK < _HALF:
            self._kept.clear()
            self.ahead = received
        else:
            self.acknowledge(received)

    def abandon_replay(self) -> None:
        """End a replay early. The next frame follows the frames that the other end received from an earlier process."""
        if self.ahead is not None:
            self._sent += (self.ahead - self._sent) & COUNT_MASK
            self.ahead = None

    def acknowledge(self, received: int) -> None:
        """Drop the frames up to number `received`, which the other end has received.

        Raises:
            ProtocolError: fewer than `received` frames were sent.
        """
        if self.ahead is not None:
            self.ahead = received
            return
        unacknowledged = (self._sent - received) & COUNT_MASK
        frames = self._kept
        received_count = len(frames) - unacknowledged
        if received_count < 0:
            if unacknowledged < _HALF:
                return  # an old acknowledgement arrived late
            raise ProtocolError(f"the peer has received {received} frames of {self.sent} that were sent")
        for _ in range(received_count):
            frames.popleft()
        if not unacknowledged:
            self.borrows = False

    def copy_borrowed(self) -> None:
        """Copy borrowed bodies. Call this before their memory changes."""
        if self.borrows:
            for kept_frame in self._kept:
                if kept_frame.borrowed:
                    kept_frame.frame, kept_frame.borrowed = _copied(kept_frame.frame), False
            self.borrows = False

    def kept(self) -> list[tuple[int, Frame]]:
        """Return the unacknowledged frames with their numbers, oldest first."""
        first = self._sent - len(self._kept) + 1
        return [((first + i) & COUNT_MASK, kept_frame.frame) for i, kept_frame in enumerate(self._kept)]

    @property
    def acknowledged(self) -> int:
        """Number of frames that the other end has acknowledged, modulo 2^32."""
        return (self._sent - len(self._kept)) & COUNT_MASK

    def lost(self, received: int) -> int:
        """Return the number of acknowledged frames that the other end lost, if it has only `received` frames."""
        count = (self.acknowledged - received) & COUNT_MASK
        return count if count < _HALF else 0

    @staticmethod
    def sent_after(received_count: int, sent_count: int) -> bool:
        """Return True if frame count `sent_count` is after `received_count`, modulo 2^32."""
        return 0 < (sent_count - received_count) & COUNT_MASK < _HALF

    @property
    def empty(self) -> bool:
        """True if every frame is acknowledged."""
        return not self._kept

    @property
    def nbytes(self) -> int:
        """Bytes of all kept bodies."""
        return sum(
            kept_frame.nbytes for kept_frame in tuple(self._kept)
        )  # the reading thread may remove some meanwhile


def _copied(frame: Frame) -> Frame:
    return Frame(frame.head, [bytes(flatten(buffer)) for buffer in frame.body])


class Inbox:
    """Receiving side: counts the frames that were received from the other end.

    Attributes:
        received: number of received frames, modulo 2^32.
    """

    def __init__(self) -> None:
        self.received = 0

    def judge(self, number: int) -> FrameOrder:
        """Return whether frame `number` is the next frame, a repeated frame, or after a missing frame."""
        ahead = (number - self.received - 1) & COUNT_MASK
        if not ahead:
            return FrameOrder.NEXT
        return FrameOrder.AHEAD if ahead < _HALF else FrameOrder.REPEATED

    def take(self, frames: int = 1) -> None:
        """Count `frames` as received."""
        self.received = (self.received + frames) & COUNT_MASK

    def misses(self, sent_count: int) -> bool:
        """Return True if some of the peer's `sent_count` frames are missing."""
        return 0 < (sent_count - self.received) & COUNT_MASK < _HALF
