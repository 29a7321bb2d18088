"""Send a session's state to its client, and restore a session of a lost server from such a state."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain

from djinn_core.errors import ProtocolError, SessionLost, UnsupportedOperation
from djinn_core.hookspecs.transports import Frame
from djinn_core.protocol.delivery.record_log import sizes_of
from djinn_core.wire import limits
from djinn_core.wire.frames import flatten
from djinn_core.wire.messages import decode, encode
from djinn_core.wire.state_messages import PIECE, StateChunk, StateHeader, pieces_of
from djinn_core.wire.templates import digest_of
from djinn_server.peers.packed_values import check_item
from djinn_server.recovery.journal import TakeState
from djinn_server.recovery.snapshot_format import Snapshot, decode_snapshot
from djinn_server.session_machine import Wait

_PIECE_HEAD = encode(StateChunk())


def state_frames(take: TakeState, value_bytes: int, limit: int) -> Iterator[Frame]:
    """Yield the frames with the state that `take` returns, or a frame with the reason why it cannot be sent.

    Args:
        take: returns the state, or None if the session cannot be serialized now.
        value_bytes: bytes of the session's values.
        limit: maximum bytes of a state.
    """
    parts = take() if value_bytes <= limit else None
    if parts is None:
        obstacle = "the session has unfinished work, a memory limit, failed values or events"
        yield Frame(encode(StateHeader(reason=_too_long(value_bytes) if value_bytes > limit else obstacle)))
        return
    state, memory, transfers = parts
    nbytes = len(state) + sum(sizes_of(memory))
    if transfers or nbytes > limit:
        yield Frame(encode(StateHeader(reason="the session has transfers" if transfers else _too_long(nbytes))))
        return
    yield Frame(encode(StateHeader((len(state), *sizes_of(memory)))))
    try:
        for piece in pieces_of(chain((state,), memory)):  # only one value at a time is in host memory
            yield Frame(_PIECE_HEAD, [piece])
    except (RuntimeError, MemoryError) as error:
        yield Frame(encode(StateHeader(reason=f"the session's values cannot be read: {error}"[: limits.FAILURE_TEXT])))


def _too_long(nbytes: int) -> str:
    return f"the session has {nbytes:,} bytes"


Receive = Callable[[], Generator[Wait, None, Frame]]


def receive_state(state: StateHeader, receive: Receive) -> Generator[Wait, None, tuple[Snapshot, list[memoryview]]]:
    """Receive a session state from a client, and check that its parts are consistent.

    Raises:
        ProtocolError: the parts are inconsistent.
    """
    if not state.lengths:
        raise ProtocolError("the client sent a session state without parts")
    head, *memory = yield from _parts(state.lengths, receive)
    try:
        snapshot = decode_snapshot(bytes(head))
    except SessionLost as error:
        raise ProtocolError(f"the client sent an unreadable session state: {error}") from error
    if snapshot.stored or snapshot.promised:
        raise ProtocolError("the client sent a state that refers to weights on another server")
    if len(snapshot.items) != len(memory):
        raise ProtocolError(f"a session state has {len(snapshot.items)} items but {len(memory)} buffers")
    for item, data in zip(snapshot.items, memory, strict=True):
        check_item(item, len(data))
    for template in snapshot.templates:
        if digest_of(template.template) != template.digest:
            raise ProtocolError("the digest of a template in a session state is wrong")
    return snapshot, memory


def restore_received(
    restore: Callable[[Snapshot, list[memoryview]], None], snapshot: Snapshot, memory: list[memoryview]
) -> None:
    """Continue a session from a state that a client has sent.

    Raises:
        ProtocolError: the state is invalid, or contains ops that are not allowed.
    """
    try:
        restore(snapshot, memory)
    except (SessionLost, UnsupportedOperation, RuntimeError, ValueError, TypeError) as error:
        raise ProtocolError(f"the client sent an invalid session state: {error}") from error


def _parts(lengths: Sequence[int], receive: Receive) -> Generator[Wait, None, list[memoryview]]:
    parts: list[memoryview] = []
    for length in lengths:
        part = yield from _part(length, receive)
        parts.append(part)
    return parts


def _part(length: int, receive: Receive) -> Generator[Wait, None, memoryview]:
    """Receive one part of a state. Memory grows with the received bytes, because the announced length is not trusted."""
    pieces: list[bytes | bytearray | memoryview] = []
    remaining = length
    while remaining:
        frame = yield from receive()
        if not isinstance(decode(frame.head), StateChunk) or len(frame.body) != 1:
            raise ProtocolError("the pieces of a session state are out of order")
        piece = flatten(frame.body[0])
        if len(piece) != min(remaining, PIECE):
            raise ProtocolError(f"a piece of a state has {len(piece):,} bytes instead of {min(remaining, PIECE):,}")
        remaining -= len(piece)
        pieces.append(piece)
    return memoryview(bytearray().join(pieces))
