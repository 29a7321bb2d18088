"""The first buffer of a frame on the socket: what travels beside the frame, and where to send such buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import attrs
import msgspec

from djinn.errors import ProtocolError
from djinn.hooks import Buffer, Limits

# Fewer bytes are never sent beside a frame: what one side may announce is bounded by it.
LEAST_BULK_BYTES: Final = 64 << 10
_OFFER_BYTES: Final = 8 << 10
_PLACE_BYTES: Final = 16  # of one buffer's number and length
_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Offer of an end to take large buffers over UCX.

    Attributes:
        address: of its UCX worker.
        tag: of the first message; the lower 16 bits are 0 and count on, the others are random and known to these two ends alone.
    """

    address: Annotated[bytes, msgspec.Meta(min_length=1, max_length=4096)]
    tag: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """Announcement in a frame on the socket, besides its head and its buffers.

    Attributes:
        beside: number in the frame and length in bytes of each buffer that comes over UCX, in the order of their tags.
        offer: an offer of the sender's, which comes in a frame of its own.
    """

    beside: tuple[tuple[_Natural, _Natural], ...] = ()
    offer: Offer | None = None


_decoder = msgspec.msgpack.Decoder(Opening)


@attrs.frozen
class Layout:
    """The buffers of a frame in order: a length for each that comes beside it, the buffer itself for the others."""

    parts: tuple[int | Buffer, ...]


def encode_opening(opening: Opening) -> bytes:
    """The bytes of an opening."""
    return msgspec.msgpack.encode(opening)


def decode_opening(data: Buffer) -> Opening:
    """The opening in the first buffer of a frame.

    Raises:
        ProtocolError: it is malformed.
    """
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a frame of ucx:// with a malformed beginning: {error}") from error


def layout(opening: Opening, head: int, inline: Sequence[Buffer], limits: Limits) -> Layout:
    """Find out where the buffers of a frame belong; nothing is allocated.

    Args:
        opening: as it came.
        head: bytes of the frame's head.
        inline: the buffers that came with it.
        limits: for the whole frame.

    Raises:
        ProtocolError: the frame exceeds `limits`, or the places of its buffers contradict each other.
    """
    count = len(inline) + len(opening.beside)
    places = dict(opening.beside)
    limits.check(head, count, sum(map(len, inline)) + sum(length for _, length in opening.beside))
    if len(places) != len(opening.beside) or any(place >= count for place in places):
        raise ProtocolError("buffers that come beside a frame have no place in it")
    if any(length < LEAST_BULK_BYTES for length in places.values()):
        raise ProtocolError("a buffer comes beside a frame that is too small for it")
    rest = iter(inline)
    return Layout(tuple(places[n] if n in places else next(rest) for n in range(count)))


def on_the_socket(limits: Limits) -> Limits:
    """Limits of the socket's frames, which have an opening besides. It is empty while large buffers are not allowed."""
    if limits.body < LEAST_BULK_BYTES:
        return Limits(limits.head, limits.body, limits.buffers + 1)
    announced = min(limits.buffers, limits.body // LEAST_BULK_BYTES)
    return Limits(limits.head, limits.body + _OFFER_BYTES + _PLACE_BYTES * announced, limits.buffers + 1)
