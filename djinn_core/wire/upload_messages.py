"""Upload messages: bytes of values are sent to an executor, or found in its store by digest."""

from typing import Annotated

import msgspec

from djinn_core.wire import limits
from djinn_core.wire.message_base import Count, Digest, Dimensions, Message, Name


class UploadPart(Message, frozen=True):
    """A part of a new value's bytes, in the frame's only buffer. The first part (`start` 0) creates the value.

    Attributes:
        shape: in elements, as is `stride`.
        size: size of the storage in bytes.
        start: byte of the storage at which this part begins.
        length: with a `compression`, the bytes of the decompressed buffer.
    """

    handle: Count
    dtype: Name
    shape: Dimensions
    stride: Dimensions
    size: Count
    start: Count = 0
    compression: Name = ""
    length: Count = 0


class BlobOffer(Message, frozen=True):
    """Offer of a new value whose bytes the executor may have: like `UploadPart`, but with a BLAKE3-256 digest instead of bytes.

    The executor answers with `BlobHit` or `BlobNeeded`. Later submissions wait for the requested uploads.
    """

    handle: Count
    dtype: Name
    shape: Dimensions
    stride: Dimensions
    size: Count
    digest: Digest


class BlobQuery(Message, frozen=True):
    """Ask which blobs (size and digest) the executor has.

    The executor keeps the blobs that it has until the client sends their `BlobOffer`s or the next query.
    """

    sizes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=limits.BLOBS_ASKED)]
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=limits.BLOBS_ASKED)]


class BlobQueryReply(Message, frozen=True):
    """Reply to `BlobQuery`: True for each blob that the executor has, in the order of the query."""

    found: tuple[bool, ...]


class BlobNeeded(Message, frozen=True):
    """The executor lacks the bytes of the offer `handle`: the client sends them in `UploadPart`s."""

    handle: Count


class BlobHit(Message, frozen=True):
    """The executor had the offered bytes, and has created the value `handle` from them."""

    handle: Count


class AbortUpload(Message, frozen=True):
    """Abort an interrupted upload. Using its value raises."""

    handle: Count
