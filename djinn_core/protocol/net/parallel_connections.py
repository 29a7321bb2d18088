"""Connections parallel to another one, over which the large buffers of its frames travel in pieces.

A flow often carries less than the link: providers limit each one, and a lost packet slows it down. Each piece goes over the
connection that takes it in first, so that a slow one delays no more than its own pieces. One thread moves them all.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.system.interrupts import LOOK_SECONDS, interrupt_mask
from djinn_core.wire.frames import Buffer, Frame, StripedFrame, encode_frame
from djinn_core.wire.striping import PIECE_LIMITS, PIECE_OPENING_BYTES, Reassembly, piece_of, pieces

if TYPE_CHECKING:
    from djinn_core.protocol.net.striping import StripingConnection


class ParallelConnections:
    """The connections parallel to one, which owns them. One thread may send, and one receive.

    Attributes:
        torn: whether an interrupt has left a striped frame half taken in; the caller that takes in what `receive` gave resets it.
    """

    def __init__(self, connections: Sequence[StripingConnection], hung_up: Callable[[], bool]) -> None:
        """`hung_up` tells if the one that they are parallel to has ended. Raises `TransportError` where one of them has."""
        self._hung_up = hung_up
        self._descriptors = {
            connection: connection.fileno() for connection in connections
        }  # which a closed one does not tell any more
        self._sent = self._received = 0  # striped frames
        self.torn = False
        self._reassembly: Reassembly | None = None
        self._early: dict[StripingConnection, Frame] = {}  # pieces of later striped frames: there is no place for more
        self._ended_at: float | None = None  # when the first was seen to have ended by the receiving thread
        self._readable = selectors.DefaultSelector()
        for connection, descriptor in self._descriptors.items():
            if descriptor < 0:
                raise TransportError(connection.ended)
            connection.limits = PIECE_LIMITS
            connection.take_pieces(self._place, PIECE_OPENING_BYTES)
            self._readable.register(descriptor, selectors.EVENT_READ, connection)

    @property
    def bytes_sent(self) -> int:
        """Bytes that were put on the wire."""
        return sum(one.bytes_sent for one in self._descriptors)

    @property
    def bytes_received(self) -> int:
        """Bytes that were taken off it."""
        return sum(one.bytes_received for one in self._descriptors)

    @property
    def bandwidth(self) -> float:
        """Bytes a second that this end was seen to send, at most."""
        return sum(one.link.bandwidth for one in self._descriptors)

    # --- out --------------------------------------------------------------------------------------------------

    def send(self, buffers: Sequence[memoryview]) -> None:
        """Send the large buffers of the next striped frame.

        Raises:
            TransportError: a connection is broken, or the other end takes in nothing and an interrupt is pending.
        """
        self._sent += 1
        coming = pieces(self._sent, buffers)
        left: dict[StripingConnection, Sequence[Buffer]] = {}
        with selectors.DefaultSelector() as writable:
            self._check_ended()
            for connection, descriptor in self._descriptors.items():
                writable.register(descriptor, selectors.EVENT_WRITE, connection)
            while writable.get_map():
                ready = writable.select(LOOK_SECONDS)
                if not ready:
                    self._check_sending()
                for key, _ in ready:
                    one: StripingConnection = key.data
                    rest = left.get(one, ())
                    if not rest and (piece := next(coming, None)) is not None:
                        rest = encode_frame(piece, PIECE_LIMITS)
                    if not rest and not one.unsent:
                        writable.unregister(key.fileobj)
                    else:
                        left[one] = one.push(rest)

    def _check_ended(self) -> None:
        for connection in self._descriptors:
            if connection.ended:
                raise TransportError(connection.ended)

    def _check_sending(self) -> None:
        self._check_ended()
        if self._hung_up():
            raise TransportError("the other end closed the connection")
        if interrupt_mask.pending:
            raise TransportError("interrupted while the other end took in nothing")

    # --- in ---------------------------------------------------------------------------------------------------

    def receive(self, striped: StripedFrame, deadline: float | None) -> tuple[bool, Frame | None]:
        """Take in pieces of the next striped frame, waiting until `deadline` of `time.monotonic()`.

        Returns whether something came, and the frame, if it is whole.

        Raises:
            ProtocolError: what came is no piece that is missing.
            TransportError: a connection is broken.
        """
        self.torn = True  # but during a wait
        reassembly, came = self._reassembly, False
        if reassembly is None:
            reassembly, came = self._begin(striped), True
        while not reassembly.whole:
            self._check_coming()
            left = LOOK_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
            self.torn = False
            ready = self._readable.select(min(left, LOOK_SECONDS))
            self.torn = True
            for key, _ in ready:
                self._take_from(key.data, reassembly)
            if ready or (left < LOOK_SECONDS and deadline is not None):
                came = came or bool(ready)
                break
        if not reassembly.whole:
            return came, None
        self._reassembly = None
        return True, reassembly.frame

    def _begin(self, striped: StripedFrame) -> Reassembly:
        self._received += 1
        try:
            self._reassembly = reassembly = Reassembly(self._received, striped)
        except MemoryError:
            raise ProtocolError("no memory for the buffers of a striped frame") from None
        early = [(one, piece) for one, piece in self._early.items() if piece_of(piece.head)[0] <= reassembly.number]
        for connection, piece in early:
            reassembly.take(piece)
            del self._early[connection]
            self._readable.register(self._descriptors[connection], selectors.EVENT_READ, connection)
            self._take_from(connection, reassembly)  # under TLS more may have been read, which a selector does not see
        return reassembly

    def _take_from(self, connection: StripingConnection, reassembly: Reassembly) -> None:
        try:
            while connection not in self._early:
                self._take(connection.receive(0.0), reassembly, connection)
        except TimeoutError:
            return
        except TransportError:
            # An end that hangs up ends all of them, and the others may bring what is missing.
            self._readable.unregister(self._descriptors[connection])
            self._ended_at = self._ended_at or time.monotonic()

    def _check_coming(self) -> None:
        """Check that missing pieces may still come.

        Raises:
            ProtocolError: pieces of later frames came over all connections.
            TransportError: all connections have ended, or one has, and the other end has not hung up.
        """
        if not any(not one.ended for one in self._descriptors if one not in self._early):
            self._check_ended()
            raise ProtocolError("pieces of later striped frames came over all connections, and some are missing")
        if self._ended_at is not None and time.monotonic() - self._ended_at > LOOK_SECONDS and not self._hung_up():
            self._check_ended()

    def _take(self, piece: Frame, reassembly: Reassembly, connection: StripingConnection) -> None:
        if piece_of(piece.head)[0] <= reassembly.number:
            reassembly.take(piece)
            return
        self._early[connection] = piece
        self._readable.unregister(self._descriptors[connection])

    def _place(self, head: bytes, length: int) -> memoryview | None:
        reassembly = self._reassembly
        if reassembly is None:
            raise ProtocolError("a piece came of a striped frame that has not begun")
        return reassembly.place(head, length)

    # --- the end ----------------------------------------------------------------------------------------------

    def stop_sending(self, reason: str) -> None:
        """As `StripingConnection.stop_sending`, of each."""
        for connection in self._descriptors:
            connection.stop_sending(reason)

    def end(self, reason: str) -> None:
        """Let nothing through any more."""
        for connection in self._descriptors:
            connection.end(reason)

    def close(self) -> None:
        """Give the sockets back. No thread is inside a call."""
        self._readable.close()
        for connection in self._descriptors:
            connection.close()
