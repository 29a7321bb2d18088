"""Frames on a byte stream, without I/O.

A frame is a fixed prefix (magic, version, kind, length of the head, number of buffers, length of the body), the head, the
lengths of the buffers, then the buffers themselves. All numbers are little-endian. Of a striped frame, the large buffers
come over other connections (`striping`).
"""

from __future__ import annotations

import contextlib
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, Final, cast

import attrs
import msgspec
import numpy as np

from djinn_core.errors import ProtocolError
from djinn_core.wire.limits import BODY_BYTES, BUFFERS, HEAD_BYTES

Buffer = memoryview | bytes | bytearray

FRAME_VERSION: Final = 1
_MAGIC: Final = b"DJNF"
_PREFIX: Final = struct.Struct("<4sHHIIQ")
PREFIX_BYTES: Final = _PREFIX.size
_WHOLE, _STRIPED = 0, 1  # kinds of frames
_OPENING_STRIPED: Final = struct.pack("<4sHH", _MAGIC, FRAME_VERSION, _STRIPED)  # flag in a striped frame's prefix
_LENGTH: Final = struct.Struct("<Q")
LENGTH_BYTES: Final = _LENGTH.size
# Small parts are read together with later data, large ones directly into their memory.
_SCRATCH_BYTES: Final = 256 << 10
_DIRECT_BYTES: Final = 16 << 10
_ALIGNMENT: Final = 64
_SMALL_BYTES: Final = 1024
STRIPED_BYTES: Final = 1 << 20  # from this length on, a buffer of a striped frame is sent over other connections
_SHORT_LENGTHS: Final = tuple([_LENGTH.pack(length) for length in range(_SMALL_BYTES)])


class Frame(msgspec.Struct, frozen=True):
    """A message with its tensor data, the unit that transports move.

    Attributes:
        head: the encoded message, at most `Limits.head` bytes.
        body: raw buffers, at most `Limits.body` bytes together. Transports keep their lengths, and do not interpret
            them.
    """

    head: bytes
    body: Sequence[Buffer] = ()


class StripedFrame(msgspec.Struct, frozen=True):
    """A frame whose large buffers are sent over other connections. In their places, `body` has their lengths."""

    head: bytes
    body: Sequence[memoryview | int]


@attrs.frozen
class Limits:
    """Limits on the size of one frame, in bytes, and on its number of buffers."""

    head: int = HEAD_BYTES
    body: int = BODY_BYTES
    buffers: int = BUFFERS

    def check(self, head: int, buffers: int, body: int) -> None:
        """Raise `ProtocolError` if a frame of these sizes (bytes) is too large."""
        if head > self.head or buffers > self.buffers or body > self.body:
            raise ProtocolError(
                f"a frame with a head of {head:,} bytes and {buffers:,} buffers of {body:,} bytes in all exceeds the"
                f" limits ({self.head:,} bytes, {self.buffers:,} buffers, {self.body:,} bytes); send less at a time"
            )


def allocate(length: int) -> memoryview:
    """Return writable memory of `length` bytes, aligned for PyTorch. Its pages are untouched."""
    block = np.empty(length + _ALIGNMENT, np.uint8)
    start = -block.__array_interface__["data"][0] % _ALIGNMENT
    return memoryview(block[start : start + length])  # type: ignore[arg-type]


def flatten(buffer: Buffer) -> memoryview:
    """Return the bytes of a contiguous `buffer` without copying."""
    view = memoryview(buffer)
    if not view.nbytes:
        return memoryview(b"")
    if not view.c_contiguous:
        raise ProtocolError(f"a buffer of shape {view.shape} is not contiguous; copy it before sending")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def encode_frame(frame: Frame, limits: Limits) -> list[Buffer]:
    """Return the bytes of `frame` as buffers to write in order. The body is not copied.

    Raises:
        ProtocolError: the frame exceeds `limits`, or a buffer is not contiguous.
    """
    head = frame.head
    size = len(head)
    if not frame.body:
        if size > limits.head:
            limits.check(size, 0, 0)
        return [_PREFIX.pack(_MAGIC, FRAME_VERSION, 0, size, 0, 0) + head]
    match frame.body:
        case [bytes() as first] if (total := len(first)) < _SMALL_BYTES:  # the most frequent kind of reply
            if size > limits.head or total > limits.body or not limits.buffers:
                limits.check(size, 1, total)
            return [_PREFIX.pack(_MAGIC, FRAME_VERSION, 0, size, 1, total) + head + _SHORT_LENGTHS[total] + first]
    body = [*map(flatten, frame.body)]
    lengths = [view.nbytes for view in body]
    count, total = len(body), sum(lengths)
    packed = struct.pack(f"<{count}Q", *lengths)
    if size > limits.head or count > limits.buffers or total > limits.body:
        limits.check(size, count, total)
    prefix = _PREFIX.pack(_MAGIC, FRAME_VERSION, 0, size, count, total)
    if total < _SMALL_BYTES:  # one buffer takes the shortest way through a socket
        return [b"".join((prefix, head, packed, *body))]
    return [prefix + head + packed, *[view for view in body if view.nbytes]]


def large_bytes(buffers: Sequence[Buffer]) -> int:
    """Return the bytes of the large buffers of `encode_frame`, which other connections would carry; 0 if too few."""
    total = sum(len(buffer) for buffer in buffers[1:] if len(buffer) >= STRIPED_BYTES)
    return total if total > STRIPED_BYTES else 0


def striped(buffers: Sequence[Buffer]) -> tuple[list[Buffer], list[memoryview]]:
    """Split the buffers of `encode_frame` into a striped frame and the large buffers, which other connections carry."""
    views = [memoryview(buffer) for buffer in buffers[1:]]
    small = [view for view in views if len(view) < STRIPED_BYTES]
    opening = _OPENING_STRIPED + memoryview(buffers[0])[len(_OPENING_STRIPED) :]
    return [opening, *small], [view for view in views if len(view) >= STRIPED_BYTES]


def name_parallel(group: bytes) -> bytes:
    """Return a striped frame without buffers. Its head tells the peer which connections are parallel to this one."""
    return _PREFIX.pack(_MAGIC, FRAME_VERSION, _STRIPED, len(group), 0, 0) + group


def _check_lengths(lengths: Iterable[int], body: int) -> None:
    total = sum(lengths)
    if total != body:
        raise ProtocolError(f"a frame has buffers of {total:,} bytes, but its header announces {body:,}")


def weight(frame: Frame) -> int:
    """Return the bytes of a frame's head and body."""
    return len(frame.head) + sum(memoryview(buffer).nbytes for buffer in frame.body)


class FrameQueue(deque[Frame]):
    """Queue of received frames, oldest first, with a byte count. Change it by `append`, `popleft` and `clear` only.

    Attributes:
        nbytes: bytes of all queued frames.
    """

    nbytes = 0

    def append(self, frame: Frame) -> None:
        """Add a frame."""
        self.nbytes += weight(frame)
        super().append(frame)

    def popleft(self) -> Frame:
        """Remove and return the oldest frame."""
        frame = super().popleft()
        self.nbytes -= weight(frame)
        return frame

    def clear(self) -> None:
        """Remove all frames."""
        super().clear()
        self.nbytes = 0

    def full(self, frames: int, nbytes: int) -> bool:
        """Return True if the queue holds at least `frames` frames or `nbytes` bytes."""
        return len(self) >= frames or self.nbytes >= nbytes

    def fill(self, receive: Callable[[], Frame | None], frames: int, nbytes: int) -> None:
        """Append frames from `receive` until the queue is `full` or `receive` raises TimeoutError. Skip None."""
        with contextlib.suppress(TimeoutError):
            while not self.full(frames, nbytes):
                frame = receive()
                if frame is not None:
                    self.append(frame)


class FrameDecoder:
    """Decode frames from a byte stream that arrives in pieces. A state machine without I/O.

    Read bytes into `buffer()`, report their number with `received(count)`, take frames from `frames`. Large buffers are
    read directly into their own memory. Sizes are checked against `limits` before memory is allocated.

    Attributes:
        limits: maximum frame size. May be replaced at any time, and applies from the next frame on.
        frames: complete frames, oldest first.
        takes_striped: True if striped frames are accepted.
        waiting: an incomplete striped frame, and the frames after it.
        place: function that returns memory for a buffer, given its frame's head and its length. If it is None, this
            class allocates memory.
        when_large: callback with the bytes of each large body that begins to arrive.
    """

    def __init__(self, limits: Limits, allocate: Callable[[int], memoryview] = allocate) -> None:
        self.limits = limits
        self.frames: deque[Frame] = deque()
        self.takes_striped = False
        self.place: Callable[[bytes, int], memoryview | None] | None = None
        self.when_large: Callable[[int], None] | None = None
        self._arrived: deque[Any] = self.frames  # frames after an incomplete striped frame wait here
        self.waiting: deque[Frame | StripedFrame] = deque()
        self._striped = False  # parts of the incomplete frame
        self._allocate = allocate
        self._scratch = memoryview(np.empty(_SCRATCH_BYTES, np.uint8))  # type: ignore[arg-type]
        self._direct_bytes = _DIRECT_BYTES
        self._prefix = memoryview(bytearray(_PREFIX.size))
        self._error: ProtocolError | None = None
        self._direct = False
        self._head_length = 0
        self._opening = self._prefix
        self._body: list[memoryview | int] = []
        self._pending: deque[int] = deque()
        self._start_frame()

    @property
    def mid_frame(self) -> bool:
        """True if a frame has begun and is not complete."""
        return self._filled > 0 or self._part is not self._prefix

    @property
    def buffered_bytes(self) -> int:
        """Bytes of incomplete frames, and of frames that the caller has not taken. Thread-safe."""
        begun_parts = [part for part in list(self._body) if not isinstance(part, int)]
        frames = [*list(self.frames), *[frame for frame in list(self.waiting) if isinstance(frame, Frame)]]
        return sum(map(weight, frames)) + sum(map(len, begun_parts[:-1])) + self._filled

    def finish_striped(self, whole: Frame | None) -> None:
        """Replace the first frame of `waiting` by the complete frame `whole`.

        If `whole` is None, remove the first frame.
        """
        waiting = self.waiting
        waiting.popleft()
        if whole is not None:
            self.frames.append(whole)
        while waiting and isinstance(waiting[0], Frame):
            self.frames.append(cast("Frame", waiting.popleft()))
        if not waiting:
            self._arrived = self.frames

    def limit_read_ahead(self, nbytes: int) -> None:
        """Read at most `nbytes` ahead, because large data follows and is read directly into its own memory."""
        self._scratch = self._scratch[:nbytes]
        self._direct_bytes = min(nbytes, _DIRECT_BYTES)  # so that the end of a large buffer is not read in small pieces

    def buffer(self) -> memoryview:
        """Return the buffer for the next bytes. It is never empty, and valid until the next call of `received`.

        Raises:
            ProtocolError: the stream broke the format earlier.
        """
        if self._error is not None:
            raise copy(self._error)
        part, filled = self._part, self._filled
        self._direct = part.nbytes - filled >= self._direct_bytes
        return part[filled:] if self._direct else self._scratch

    def received(self, count: int) -> None:
        """Process `count` bytes, which were written to the start of the last `buffer()`.

        Raises:
            ProtocolError: the bytes do not follow the format or exceed the limits. The decoder cannot be used any more.
        """
        try:
            if self._direct:
                self._fill(count)
                return
            data = self._scratch[:count]
            position = 0
            if self._filled == 0 and self._part is self._prefix:  # complete frames in `data`
                while count - position >= PREFIX_BYTES:
                    kind, head, buffers, body = self._read_prefix(data, position)
                    if kind != _WHOLE:
                        break
                    start = position + PREFIX_BYTES
                    lengths = start + head
                    end = lengths + 8 * buffers + body
                    if end > count:
                        break
                    body_parts: Sequence[Buffer] = ()
                    if buffers == 1 and body < _SMALL_BYTES and data[lengths : lengths + 8] == _SHORT_LENGTHS[body]:
                        body_parts = [memoryview(bytearray(data[lengths + 8 : end]))]  # the most frequent kind of reply
                    elif buffers:
                        body_parts = self._cut_body(data, lengths, buffers, body)
                    self._arrived.append(Frame(bytes(data[start:lengths]), body_parts))
                    position = end
            if position < count:
                self._distribute(data, position)
        except ProtocolError as error:
            self._error = copy(error)  # `error` refers to its stack frames, and these to `error`
            raise

    def feed(self, data: Buffer) -> None:
        """Process a copy of `data`, for streams that cannot read into given memory.

        It raises the errors of `received`.
        """
        remaining = flatten(data)
        while remaining:
            target = self.buffer()
            count = min(len(target), len(remaining))
            target[:count] = remaining[:count]
            self.received(count)
            remaining = remaining[count:]

    def _distribute(self, data: memoryview, position: int) -> None:
        while position < len(data):
            count = min(len(self._part) - self._filled, len(data) - position)
            self._part[self._filled : self._filled + count] = data[position : position + count]
            position += count
            self._fill(count)

    def _cut_body(self, data: memoryview, position: int, buffers: int, body: int) -> list[memoryview]:
        """Return copies of the `buffers` buffers of a frame, `body` bytes together. Their lengths begin at `position`."""
        if buffers == 1:
            lengths: tuple[int, ...] = _LENGTH.unpack_from(data, position)
            if lengths[0] != body:
                _check_lengths(lengths, body)
        else:
            lengths = struct.unpack_from(f"<{buffers}Q", data, position)
            _check_lengths(lengths, body)
        position += 8 * buffers
        body_parts = []
        for length in lengths:
            part = data[position : position + length]
            position += length
            if length < _SMALL_BYTES:
                body_parts.append(memoryview(bytearray(part)))
            else:
                body_parts.append(self._reserve(length))
                body_parts[-1][:] = part
        return body_parts

    def _fill(self, count: int) -> None:
        self._filled += count
        if self._filled == len(self._part):
            self._finish_part(self)

    def _start_part(self, part: memoryview, finish: Callable[[FrameDecoder], None]) -> None:
        # Not a bound method: a reference cycle would keep its memory until the garbage collector runs.
        self._part = part
        self._filled = 0
        self._finish_part = finish

    def _start_frame(self) -> None:
        self._start_part(self._prefix, FrameDecoder._finish_prefix)

    def _read_prefix(self, data: memoryview, position: int) -> tuple[int, int, int, int]:
        """Return the checked kind, head length, number of buffers and body length of a frame."""
        magic, version, kind, head, buffers, body = _PREFIX.unpack_from(data, position)
        if magic != _MAGIC:
            raise ProtocolError(f"not a frame: it starts with {bytes(magic)!r}; is the peer Djinn?")
        if version != FRAME_VERSION or kind > (_STRIPED if self.takes_striped else _WHOLE):
            raise ProtocolError(f"a frame has version {version} (kind {kind}), not {FRAME_VERSION}: update one end")
        limits = self.limits
        if head > limits.head or buffers > limits.buffers or body > limits.body:
            limits.check(head, buffers, body)
        if body and not buffers:
            raise ProtocolError(f"a frame has no buffers, but its header announces {body:,} bytes")
        return kind, head, buffers, body

    def _finish_prefix(self) -> None:
        kind, head, buffers, body = self._read_prefix(self._prefix, 0)
        self._striped = kind == _STRIPED
        if body > STRIPED_BYTES and self.when_large is not None:
            self.when_large(body)
        self._head_length = head
        self._body_length = body
        length = head + _LENGTH.size * buffers
        self._opening = self._reserve(length) if length >= _DIRECT_BYTES else memoryview(bytearray(length))
        self._start_part(self._opening, FrameDecoder._finish_opening)
        if not self._opening:
            self._finish_opening()

    def _finish_opening(self) -> None:
        lengths = self._opening[self._head_length :]
        self._pending = deque(struct.unpack(f"<{len(lengths) // _LENGTH.size}Q", lengths))
        _check_lengths(self._pending, self._body_length)
        self._body = []
        self._next_buffer()

    def _next_buffer(self) -> None:
        while self._pending:
            length = self._pending.popleft()
            if self._striped and length >= STRIPED_BYTES:
                self._body.append(length)
                continue
            caller_memory = (
                self.place(bytes(self._opening[: self._head_length]), length) if self.place is not None else None
            )
            buffer = self._reserve(length) if caller_memory is None else caller_memory
            self._body.append(buffer)
            if length:
                self._start_part(buffer, FrameDecoder._next_buffer)
                return
        self._finish_frame(bytes(self._opening[: self._head_length]))
        # The frame belongs to the caller now: nothing here may keep its memory alive.
        self._opening, self._body = self._prefix, []
        self._start_frame()

    def _finish_frame(self, head: bytes) -> None:
        if self._striped:
            self._arrived = self.waiting
            self._arrived.append(StripedFrame(head, self._body))
        else:
            self._arrived.append(Frame(head, cast("list[memoryview]", self._body)))

    def _reserve(self, length: int) -> memoryview:
        try:
            return self._allocate(length)
        except MemoryError:
            raise ProtocolError(f"no memory for a buffer of {length:,} bytes") from None
