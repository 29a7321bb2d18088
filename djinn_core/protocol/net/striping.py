"""Connections over streams that send large buffers over parallel connections as well."""

from __future__ import annotations

import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from djinn_core.errors import DjinnError, ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection
from djinn_core.logs import get_logger
from djinn_core.protocol.net.parallel_connections import ParallelConnections
from djinn_core.protocol.net.streams import StreamConnection
from djinn_core.system.interrupts import interrupt_mask
from djinn_core.wire.frames import Buffer, Frame, Limits, large_bytes, name_parallel, striped
from djinn_core.wire.message_base import GROUP_BYTES

MANY_BYTES: Final = 16 << 20
PARALLEL_CONNECTIONS: Final = 4  # to another machine
_log = get_logger("djinn.delivery")


class StripingConnection(StreamConnection):
    """A connection that may send large buffers over parallel connections, or may itself be a parallel connection.

    Attributes:
        bytes_sent: as in `Connection`.
        bytes_received: as in `Connection`.
    """

    bytes_sent: int = 0
    bytes_received: int = 0

    def __init__(self, limits: Limits, peer: str) -> None:
        super().__init__(limits, peer)
        self._start_when_many: Callable[[], None] | None = None
        self._large_bytes = 0
        self._parallel: ParallelConnections | None = None
        self._find_parallel: Callable[[bytes], Sequence[StripingConnection]] | None = None
        self._end_event = threading.Event()

    # --- methods for subclasses ----------------------------------------------------------------------------

    @abstractmethod
    def fileno(self) -> int:
        """Return the descriptor to wait for."""

    @abstractmethod
    def push(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Send as much over this parallel connection as the other end accepts now. Return the unsent buffers.

        Raises:
            OSError: the connection has ended, or breaks during the call.
        """

    @property
    @abstractmethod
    def unsent(self) -> bool:
        """True if some bytes that `push` accepted are not on the wire yet. Call `push` without buffers to send them."""

    @property
    @abstractmethod
    def hung_up(self) -> bool:
        """True if the connection has ended, or the other end has stopped sending. Thread-safe."""

    @property
    @abstractmethod
    def local(self) -> bool:
        """True if the other end is on this machine."""

    @abstractmethod
    def _count_parallel(self, bytes_sent: int, bytes_received: int) -> None:
        """Count bytes that parallel connections have sent and received."""

    # --- main connection --------------------------------------------------------------------------------------

    def stripe(
        self, number: int, dial: Callable[[bytes], Connection], on_start: Callable[[], None] = lambda: None
    ) -> None:
        """Once `MANY_BYTES` of large buffers were sent or received, open parallel connections for further large buffers.

        Args:
            number: number of parallel connections; 0: four to another machine, one on this machine. If it is 1, none is
                opened.
            dial: opens a connection of a group, given the name of the group.
            on_start: called before the parallel connections are opened.
        """
        number = number or (1 if self.local else PARALLEL_CONNECTIONS)
        if number > 1:
            self._start_when_many, self._large_bytes = partial(self._start_parallel, number, dial, on_start), 0
            self._decoder.when_large = self._count_many

    def _start_parallel(self, number: int, dial: Callable[[bytes], Connection], on_start: Callable[[], None]) -> None:
        on_start()
        opener = threading.Thread(
            target=self._open_parallel, args=(number, dial), name="djinn-connections", daemon=True
        )
        try:
            opener.start()
        except RuntimeError as error:  # no more threads can start, for example at exit
            _log.info("large tensors go over one connection", peer=self.peer, reason=str(error))

    def _open_parallel(self, number: int, dial: Callable[[bytes], Connection]) -> None:
        group, connections = secrets.token_bytes(GROUP_BYTES), list[StripingConnection]()
        try:
            while len(connections) < number:
                connection = dial(group)
                if not isinstance(connection, StripingConnection):
                    connection.close()
                    raise TransportError("the transport does not support parallel connections")
                connections.append(connection)
            self.use_parallel(group, connections)
        except (DjinnError, OSError) as error:
            _log.info("large tensors go over one connection", peer=self.peer, reason=str(error))
            for opened_connection in connections:
                opened_connection.close()

    def use_parallel(self, group: bytes, connections: Sequence[StripingConnection]) -> None:
        """Send large buffers over `connections` from now on.

        The other end knows them as `group`. They end with this connection.

        Raises:
            TransportError: this connection has ended.
        """
        with interrupt_mask, self._send_lock:
            if self._send_closed or self._end_reason:
                raise TransportError(self._end_reason or self._send_closed)
            self._take_parallel(connections)
            self._sent = []
            try:
                self._unsent_rest = [
                    bytes(buffer) for buffer in self._write([*self._unsent_rest, name_parallel(group)])
                ]
            except OSError as error:
                raise TransportError(self.stop_sending(f"cannot send: {error}")) from error

    def accept_parallel(self, find: Callable[[bytes], Sequence[StripingConnection]]) -> None:
        """Allow the other end to name parallel connections. `find` removes and returns a group's connections."""
        self._find_parallel = find
        self._decoder.takes_striped = True

    def _take_parallel(self, connections: Sequence[StripingConnection]) -> None:
        self._decoder.takes_striped = True
        try:
            self._parallel = ParallelConnections(connections, lambda: self.hung_up)
        except OSError:  # a connection has ended, or there are no more descriptors
            for connection in connections:
                connection.end("the main connection could not use this parallel connection")
            raise

    def _stripe(self, buffers: Sequence[Buffer]) -> tuple[Sequence[Buffer], Sequence[memoryview]]:
        nbytes = large_bytes(buffers)
        if nbytes and self._parallel is not None:
            return striped(buffers)
        if nbytes and self._start_when_many is not None:
            self._count_many(nbytes)
        return buffers, ()

    def _count_many(self, nbytes: int) -> None:
        self._large_bytes += nbytes
        if self._large_bytes >= MANY_BYTES and self._start_when_many is not None:
            notify, self._start_when_many, self._decoder.when_large = self._start_when_many, None, None
            notify()

    def _send_large(self, large: Sequence[memoryview], unsent: Sequence[Buffer]) -> None:
        if unsent or self._parallel is None:
            raise TransportError("interrupted while the peer was not reading")
        before = self._parallel.bytes_sent
        self._parallel.send(large)
        self._count_parallel(self._parallel.bytes_sent - before, 0)

    def _receive_large(self, deadline: float | None) -> bool:
        """Feed the decoder once, while a striped frame waits for its large buffers."""
        first = self._decoder.waiting[0]
        if not first.body:
            self._follow(first.head)
            self._decoder.finish_striped(None)
            return True
        parallel = self._parallel
        if parallel is None or isinstance(first, Frame):
            raise ProtocolError("a striped frame arrived, but there are no parallel connections")
        before = parallel.bytes_received
        has_arrived, frame = parallel.receive(first, deadline)
        self._count_parallel(0, parallel.bytes_received - before)
        if frame is not None:
            self._decoder.finish_striped(frame)
        parallel.torn = False
        return has_arrived

    @property
    def _torn(self) -> bool:
        return self._parallel is not None and self._parallel.torn

    def _follow(self, group: bytes) -> None:
        group_connections = (
            self._find_parallel(group) if self._find_parallel is not None and self._parallel is None else ()
        )
        if not group_connections:
            raise ProtocolError("the peer named unknown parallel connections")
        self._take_parallel(group_connections)

    # --- parallel connection ----------------------------------------------------------------------------------

    def take_pieces(self, place: Callable[[bytes, int], memoryview | None], nbytes: int) -> None:
        """From now on, receive pieces into memory that `place` returns, and read at most `nbytes` ahead of them."""
        self._decoder.place = place
        self._decoder.limit_read_ahead(nbytes)

    @property
    def ended(self) -> str:
        """The reason why the connection has ended; empty while it is open."""
        return self._end_reason

    def end(self, reason: str) -> None:
        """Shut down both directions. `close` releases the resources."""
        self._end(reason)

    def await_end(self, timeout: float | None = None) -> bool:
        """Wait until the connection has ended. Return False after `timeout` seconds."""
        return self._end_event.wait(timeout)

    # --- closing ----------------------------------------------------------------------------------------------

    def _hang_up(self) -> None:
        if self._parallel is not None:
            self._parallel.stop_sending("the main connection has stopped sending")

    def _shut_down(self) -> None:
        if self._parallel is not None:
            self._parallel.end("the main connection has ended")
        self._end_event.set()

    def _drop(self) -> None:
        if self._parallel is not None:
            self._parallel.close()
        self._parallel = self._start_when_many = self._decoder.place = self._decoder.when_large = (
            None  # they refer back to this connection
        )
