"""Upload messages: bytes of values are sent to an executor, or recalled from its store by digest."""

from typing import Annotated

import msgspec

from djinn_core.wire import limits
from djinn_core.wire.message_base import Count, Digest, Dimensions, Message, Name


class UploadPart(Message, frozen=True):
    """A part of a new value's bytes, in the frame's only buffer. The first part (`start` 0) makes the value.

    `size` is the size of the storage in bytes; shape, stride and offset are in elements. Where there is a `compression`, the
    buffer stands for `length` bytes.
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
    """A new value whose bytes the executor may have: like `UploadPart`, with their BLAKE3-256 in place of them.

    The executor answers with `BlobHit` or `BlobNeeded`. A submission that follows waits for the uploads that are wanted.
    """

    handle: Count
    dtype: Name
    shape: Dimensions
    stride: Dimensions
    size: Count
    digest: Digest


class BlobQuery(Message, frozen=True):
    """Ask which of these blobs (size and digest) the executor has. It holds on to those until they are offered once."""

    sizes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=limits.BLOBS_ASKED)]
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=limits.BLOBS_ASKED)]


class BlobQueryReply(Message, frozen=True):
    """Reply to `BlobQuery`, in the same order."""

    found: tuple[bool, ...]


class BlobNeeded(Message, frozen=True):
    """The executor does not have what was offered as `handle`: the client sends it in `UploadPart`s."""

    handle: Count


class BlobHit(Message, frozen=True):
    """The executor had the bytes that were offered, and has made the value `handle` of them."""

    handle: Count


class AbortUpload(Message, frozen=True):
    """Abort an upload that was interrupted; using its value raises."""

    handle: Count
