"""Parallel connections, which carry the large buffers of another connection's frames in pieces.

A TCP flow often uses only part of the link: providers limit each flow, and a lost packet slows it down. Each piece is
sent over the first connection that accepts it, so a slow connection delays only its own pieces. One thread moves all
pieces.
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
    """The parallel connections that belong to one main connection. One thread may send while another receives.

    Attributes:
        torn: True if an interrupt has left a striped frame incomplete. The caller that processes the result of
            `receive` resets it.
    """

    def __init__(self, connections: Sequence[StripingConnection], hung_up: Callable[[], bool]) -> None:
        """Use `connections` for one main connection. `hung_up` returns True if the main connection has ended.

        Raises:
            TransportError: a parallel connection has ended.
        """
        self._hung_up = hung_up
        self._descriptors = {
            connection: connection.fileno() for connection in connections
        }  # cached, because a closed connection does not report it
        self._sent_frames = self._received_frames = 0  # number of striped frames
        self.torn = False
        self._reassembly: Reassembly | None = None
        # pieces of later striped frames, for which there is no memory yet
        self._early: dict[StripingConnection, Frame] = {}
        self._ended_at: float | None = None  # time at which the receiving thread first saw an ended connection
        self._readable = selectors.DefaultSelector()
        for connection, descriptor in self._descriptors.items():
            if descriptor < 0:
                raise TransportError(connection.ended)
            connection.limits = PIECE_LIMITS
            connection.take_pieces(self._place, PIECE_OPENING_BYTES)
            self._readable.register(descriptor, selectors.EVENT_READ, connection)

    @property
    def bytes_sent(self) -> int:
        """Bytes put on the wire."""
        return sum(connection.bytes_sent for connection in self._descriptors)

    @property
    def bytes_received(self) -> int:
        """Bytes taken off the wire."""
        return sum(connection.bytes_received for connection in self._descriptors)

    @property
    def bandwidth(self) -> float:
        """Highest observed send rate in bytes per second."""
        return sum(connection.link.bandwidth for connection in self._descriptors)

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, buffers: Sequence[memoryview]) -> None:
        """Send the large buffers of the next striped frame.

        Raises:
            TransportError: a connection is broken, or the other end does not read and an interrupt is pending.
        """
        self._sent_frames += 1
        pieces_to_send = pieces(self._sent_frames, buffers)
        unsent: dict[StripingConnection, Sequence[Buffer]] = {}
        with selectors.DefaultSelector() as writable:
            self._check_ended()
            for connection, descriptor in self._descriptors.items():
                writable.register(descriptor, selectors.EVENT_WRITE, connection)
            while writable.get_map():
                ready = writable.select(LOOK_SECONDS)
                if not ready:
                    self._check_sending()
                for key, _ in ready:
                    ready_connection: StripingConnection = key.data
                    data = unsent.get(ready_connection, ())
                    if not data and (piece := next(pieces_to_send, None)) is not None:
                        data = encode_frame(piece, PIECE_LIMITS)
                    if not data and not ready_connection.unsent:
                        writable.unregister(key.fileobj)
                    else:
                        unsent[ready_connection] = ready_connection.push(data)

    def _check_ended(self) -> None:
        for connection in self._descriptors:
            if connection.ended:
                raise TransportError(connection.ended)

    def _check_sending(self) -> None:
        self._check_ended()
        if self._hung_up():
            raise TransportError("the peer closed the connection")
        if interrupt_mask.pending:
            raise TransportError("interrupted while the peer was not reading")

    # --- receiving --------------------------------------------------------------------------------------------

    def receive(self, striped: StripedFrame, deadline: float | None) -> tuple[bool, Frame | None]:
        """Receive pieces of the next striped frame until the `time.monotonic()` value `deadline`.

        Return a pair: True if bytes arrived before `deadline`, and the frame, which is None while it is incomplete.

        Raises:
            ProtocolError: the received data are not a missing piece.
            TransportError: a connection is broken.
        """
        self.torn = True  # but during a wait
        reassembly, has_arrived = self._reassembly, False
        if reassembly is None:
            reassembly, has_arrived = self._begin(striped), True
        while not reassembly.whole:
            self._check_can_arrive()
            seconds_left = LOOK_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
            self.torn = False
            ready = self._readable.select(min(seconds_left, LOOK_SECONDS))
            self.torn = True
            for key, _ in ready:
                self._receive_pieces(key.data, reassembly)
            if ready or (seconds_left < LOOK_SECONDS and deadline is not None):
                has_arrived = has_arrived or bool(ready)
                break
        if not reassembly.whole:
            return has_arrived, None
        self._reassembly = None
        return True, reassembly.frame

    def _begin(self, striped: StripedFrame) -> Reassembly:
        self._received_frames += 1
        try:
            self._reassembly = reassembly = Reassembly(self._received_frames, striped)
        except MemoryError:
            raise ProtocolError("no memory for the buffers of a striped frame") from None
        early = [
            (connection, piece)
            for connection, piece in self._early.items()
            if piece_of(piece.head)[0] <= reassembly.number
        ]
        for connection, piece in early:
            reassembly.take(piece)
            del self._early[connection]
            self._readable.register(self._descriptors[connection], selectors.EVENT_READ, connection)
            self._receive_pieces(connection, reassembly)  # TLS may have buffered more, which a selector does not report
        return reassembly

    def _receive_pieces(self, connection: StripingConnection, reassembly: Reassembly) -> None:
        try:
            while connection not in self._early:
                self._add_piece(connection.receive(0.0), reassembly, connection)
        except TimeoutError:
            return
        except TransportError:
            # An end that hangs up closes all connections, and the others may still deliver missing pieces.
            self._readable.unregister(self._descriptors[connection])
            self._ended_at = self._ended_at or time.monotonic()

    def _check_can_arrive(self) -> None:
        """Check that missing pieces can still arrive.

        Raises:
            ProtocolError: pieces of later frames came over all connections, so the missing pieces cannot follow.
            TransportError: all connections have ended, or one connection has ended although the other end has not
                hung up.
        """
        if not any(not connection.ended for connection in self._descriptors if connection not in self._early):
            self._check_ended()
            raise ProtocolError(
                "pieces of later striped frames arrived on all connections, but earlier pieces are missing"
            )
        if self._ended_at is not None and time.monotonic() - self._ended_at > LOOK_SECONDS and not self._hung_up():
            self._check_ended()

    def _add_piece(self, piece: Frame, reassembly: Reassembly, connection: StripingConnection) -> None:
        if piece_of(piece.head)[0] <= reassembly.number:
            reassembly.take(piece)
            return
        self._early[connection] = piece
        self._readable.unregister(self._descriptors[connection])

    def _place(self, head: bytes, length: int) -> memoryview | None:
        reassembly = self._reassembly
        if reassembly is None:
            raise ProtocolError("a piece of a striped frame arrived before the frame's head")
        return reassembly.place(head, length)

    # --- closing ----------------------------------------------------------------------------------------------

    def stop_sending(self, reason: str) -> None:
        """Stop sending on each connection."""
        for connection in self._descriptors:
            connection.stop_sending(reason)

    def end(self, reason: str) -> None:
        """Shut down all connections."""
        for connection in self._descriptors:
            connection.end(reason)

    def close(self) -> None:
        """Close the sockets. No thread may be inside a call."""
        self._readable.close()
        for connection in self._descriptors:
            connection.close()
