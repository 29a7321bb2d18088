"""The first buffer of a frame on the socket. It lists the buffers that come over UCX, or offers to receive them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import attrs
import msgspec

from djinn.errors import ProtocolError
from djinn.hooks import Buffer, Limits

# Minimum size of a buffer over UCX, which bounds the number of announced buffers.
MIN_BULK_BYTES: Final = 64 << 10
_OFFER_BYTES: Final = 8 << 10
_PLACE_BYTES: Final = 16  # bytes of one buffer's position and length
_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Where an end of a connection can receive large buffers over UCX.

    Attributes:
        address: address of the UCX worker that receives.
        tag: tag of the first message. The lower 16 bits count messages from 0. The other bits are random and secret.
    """

    address: Annotated[bytes, msgspec.Meta(min_length=1, max_length=4096)]
    tag: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """Content of the first buffer of a frame on the socket.

    Attributes:
        beside: position in the frame and length in bytes of each buffer that comes over UCX, in the order of their tags.
        offer: where the sender of this frame can receive over UCX, or None. If not None, the frame holds nothing else.
    """

    beside: tuple[tuple[_Natural, _Natural], ...] = ()
    offer: Offer | None = None


_decoder = msgspec.msgpack.Decoder(Opening)


@attrs.frozen
class Layout:
    """The buffers of a frame, in order.

    Attributes:
        parts: for a buffer that comes over UCX, its length in bytes. For a buffer from the socket, the buffer itself.
    """

    parts: tuple[int | Buffer, ...]


def encode_opening(opening: Opening) -> bytes:
    """Encode the first buffer of a frame."""
    return msgspec.msgpack.encode(opening)


def decode_opening(data: Buffer) -> Opening:
    """Decode the first buffer of a frame.

    Raises:
        ProtocolError: the buffer is malformed.
    """
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a frame of ucx:// has a malformed header: {error}") from error


def layout(opening: Opening, head: int, inline: Sequence[Buffer], limits: Limits) -> Layout:
    """Return the layout of a frame's buffers. No memory is allocated.

    Args:
        opening: the decoded opening.
        head: bytes of the frame's head.
        inline: the buffers that came over the socket.
        limits: limits of the whole frame.

    Raises:
        ProtocolError: the frame exceeds `limits`, or the positions are inconsistent.
    """
    count = len(inline) + len(opening.beside)
    places = dict(opening.beside)
    limits.check(head, count, sum(map(len, inline)) + sum(length for _, length in opening.beside))
    if len(places) != len(opening.beside) or any(place >= count for place in places):
        raise ProtocolError("buffers sent over UCX have invalid positions in the frame")
    if any(length < MIN_BULK_BYTES for length in places.values()):
        raise ProtocolError(f"a buffer sent over UCX is smaller than {MIN_BULK_BYTES:,} bytes")
    inline_buffers = iter(inline)
    return Layout(tuple(places[n] if n in places else next(inline_buffers) for n in range(count)))


def socket_limits(limits: Limits) -> Limits:
    """Return the limits for frames on the socket: `limits` plus the first buffer.

    The first buffer is empty while large buffers are forbidden.
    """
    if limits.body < MIN_BULK_BYTES:
        return Limits(limits.head, limits.body, limits.buffers + 1)
    announced = min(limits.buffers, limits.body // MIN_BULK_BYTES)
    return Limits(limits.head, limits.body + _OFFER_BYTES + _PLACE_BYTES * announced, limits.buffers + 1)
