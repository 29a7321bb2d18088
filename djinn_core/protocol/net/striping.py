"""Connections over streams that send large buffers over others parallel to them, too."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.protocol.net.parallel_connections import ParallelConnections
from djinn_core.protocol.net.streams import StreamConnection
from djinn_core.system.interrupts import interrupt_mask
from djinn_core.wire.frames import Buffer, Frame, Limits, large_bytes, name_parallel, striped

MANY_BYTES: Final = 16 << 20


class StripingConnection(StreamConnection):
    """A connection to which others may be parallel, and which may be parallel to another.

    Attributes:
        bytes_sent, bytes_received: as in `Connection`.
    """

    bytes_sent: int = 0
    bytes_received: int = 0

    def __init__(self, limits: Limits, peer: str) -> None:
        super().__init__(limits, peer)
        self._when_many: Callable[[], None] | None = None
        self._many = 0
        self._parallel: ParallelConnections | None = None
        self._find_parallel: Callable[[bytes], Sequence[StripingConnection]] | None = None
        self._over = threading.Event()

    # --- what a subclass does -------------------------------------------------------------------------------

    @abstractmethod
    def fileno(self) -> int:
        """Descriptor to wait for."""

    @abstractmethod
    def push(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Send what the other end takes in now, as a parallel connection; what is left.

        Raises:
            OSError: the connection has ended, or ends.
        """

    @property
    @abstractmethod
    def unsent(self) -> bool:
        """True if some of what `push` took is not on the wire yet; `push` of nothing goes on."""

    @property
    @abstractmethod
    def hung_up(self) -> bool:
        """True if the connection has ended, or the other end sends nothing more. Any thread may ask."""

    @property
    @abstractmethod
    def local(self) -> bool:
        """True if the other end is on this machine."""

    @abstractmethod
    def _count_parallel(self, sent: int, received: int) -> None:
        """Count bytes that passed parallel connections."""

    # --- as the one to which others are parallel --------------------------------------------------------------

    def call_when_many(self, told: Callable[[], None]) -> None:
        """Call `told`, once, when `MANY_BYTES` of large buffers have been sent or received."""
        self._when_many, self._many = told, 0
        self._decoder.when_large = self._count_many

    def use_parallel(self, group: bytes, connections: Sequence[StripingConnection]) -> None:
        """Send large buffers over `connections`, which the other end knows as `group`, from now on. They end with this one.

        Raises:
            TransportError: this connection has ended.
        """
        with interrupt_mask, self._sending:
            if self._mute or self._ended:
                raise TransportError(self._ended or self._mute)
            self._take_parallel(connections)
            self._sent = []
            try:
                self._rest = [bytes(buffer) for buffer in self._write([*self._rest, name_parallel(group)])]
            except OSError as error:
                raise TransportError(self.stop_sending(f"cannot send: {error}")) from error

    def accept_parallel(self, find: Callable[[bytes], Sequence[StripingConnection]]) -> None:
        """Let the other end name parallel connections; `find` gives, once, those of a group."""
        self._find_parallel = find
        self._decoder.takes_striped = True

    def _take_parallel(self, connections: Sequence[StripingConnection]) -> None:
        self._decoder.takes_striped = True
        try:
            self._parallel = ParallelConnections(connections, lambda: self.hung_up)
        except OSError:  # one has ended, or there are no more descriptors
            for connection in connections:
                connection.end("the connection that they are parallel to could not take it")
            raise

    def _stripe(self, buffers: Sequence[Buffer]) -> tuple[Sequence[Buffer], Sequence[memoryview]]:
        nbytes = large_bytes(buffers)
        if nbytes and self._parallel is not None:
            return striped(buffers)
        if nbytes and self._when_many is not None:
            self._count_many(nbytes)
        return buffers, ()

    def _count_many(self, nbytes: int) -> None:
        self._many += nbytes
        if self._many >= MANY_BYTES and self._when_many is not None:
            told, self._when_many, self._decoder.when_large = self._when_many, None, None
            told()

    def _send_large(self, large: Sequence[memoryview], left: Sequence[Buffer]) -> None:
        if left or self._parallel is None:
            raise TransportError("interrupted while the other end took in nothing")
        before = self._parallel.bytes_sent
        self._parallel.send(large)
        self._count_parallel(self._parallel.bytes_sent - before, 0)

    def _receive_large(self, deadline: float | None) -> bool:
        """As `_receive_some`, where a striped frame waits for its large buffers."""
        first = self._decoder.waiting[0]
        if not first.body:
            self._follow(first.head)
            self._decoder.finish_striped(None)
            return True
        parallel = self._parallel
        if parallel is None or isinstance(first, Frame):
            raise ProtocolError("a striped frame came, and there are no parallel connections")
        before = parallel.bytes_received
        came, whole = parallel.receive(first, deadline)
        self._count_parallel(0, parallel.bytes_received - before)
        if whole is not None:
            self._decoder.finish_striped(whole)
        parallel.torn = False
        return came

    @property
    def _torn(self) -> bool:
        return self._parallel is not None and self._parallel.torn

    def _follow(self, group: bytes) -> None:
        found = self._find_parallel(group) if self._find_parallel is not None and self._parallel is None else ()
        if not found:
            raise ProtocolError("parallel connections are named that are not there")
        self._take_parallel(found)

    # --- as a parallel one ------------------------------------------------------------------------------------

    def take_pieces(self, place: Callable[[bytes, int], memoryview | None], nbytes: int) -> None:
        """Receive pieces: `place` gives memory for one that begins to come, with `nbytes` before its own bytes."""
        self._decoder.place = place
        self._decoder.read_little(nbytes)

    @property
    def ended(self) -> str:
        """The reason why nothing goes either way any more; empty while it does."""
        return self._ended

    def end(self, reason: str) -> None:
        """Let nothing through any more. What it took is given back by `close`."""
        self._end(reason)

    def await_end(self, timeout: float | None = None) -> bool:
        """Wait until nothing goes either way any more; False if `timeout` seconds passed first."""
        return self._over.wait(timeout)

    # --- the end ----------------------------------------------------------------------------------------------

    def _hang_up(self) -> None:
        if self._parallel is not None:
            self._parallel.stop_sending("the connection that they are parallel to sends nothing more")

    def _shut_down(self) -> None:
        if self._parallel is not None:
            self._parallel.end("the connection that they are parallel to has ended")
        self._over.set()

    def _drop(self) -> None:
        if self._parallel is not None:
            self._parallel.close()
        self._parallel = self._when_many = self._decoder.place = self._decoder.when_large = None  # they lead back here
