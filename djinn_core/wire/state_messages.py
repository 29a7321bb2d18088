"""Messages of session snapshots: the state moves from an executor to its client, and from the client to another executor.

The state is sent in pieces: first the description (a snapshot, in MessagePack), then the memory of its values.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final

import msgspec

from djinn_core.wire import limits
from djinn_core.wire.frames import Buffer, flatten
from djinn_core.wire.message_base import Count, Message, PrintableFields

PIECE: Final = 4 << 20  # bytes per frame


class StateRequest(Message, frozen=True):
    """The client requests the state of its session between two submissions, if it has at most `limit` bytes."""

    limit: Count


class StateHeader(PrintableFields, Message, frozen=True):
    """Start of a session's state. An executor sends it as a reply, a client as its first message to another executor.

    The pieces of the state follow. If a value cannot be read later, a header without lengths takes the place of the next piece.

    Attributes:
        lengths: bytes of each part of the state. A part is sent in frames of `PIECE` bytes at most. Empty if no state is
            available.
        reason: reason why no state is available.
    """

    texts = ("reason",)

    lengths: Annotated[tuple[Count, ...], msgspec.Meta(max_length=limits.STATE_PARTS)] = ()
    reason: str = ""


class StateChunk(Message, frozen=True):
    """A piece of a part, as the frame's body. Parts and their pieces come in order."""


def pieces_of(parts: Iterable[Buffer]) -> Iterator[memoryview]:
    """Yield the pieces of all parts in order. An empty part has no pieces."""
    for part in parts:
        view = flatten(part)
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]


def count_pieces(lengths: Sequence[int]) -> int:
    """Return the number of pieces for parts of these lengths."""
    return sum(-(-length // PIECE) for length in lengths)
