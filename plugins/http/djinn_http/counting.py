"""Counts the bytes between an asyncio protocol and its socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

from djinn_http.pace import RequestTimeLimit

# Key of `get_extra_info` under which a transport, also with TLS on top, returns its `CountingTransport`.
COUNTING: Final = "djinn.counting"


class CountingTransport:
    """Wrapper of an asyncio transport. It counts written bytes, and `Counting` adds the received bytes.

    Attributes:
        sent: bytes sent since the last `take`.
        received: bytes received since the last `take`.
        pace: time limit of the peer's requests.
    """

    def __init__(self, transport: asyncio.Transport, pace: RequestTimeLimit) -> None:
        self.sent = 0
        self.received = 0
        self.pace = pace
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the wrapped transport, or this object for the name `COUNTING`."""
        return self if name == COUNTING else self._transport.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write bytes and count them."""
        self.sent += len(data)
        self._transport.write(data)

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write several buffers and count their bytes."""
        buffers = list(parts)
        self.sent += sum(map(len, buffers))
        self._transport.writelines(buffers)

    def take(self) -> tuple[int, int]:
        """Return the bytes sent and the bytes received since the last call."""
        counts = self.sent, self.received
        self.sent = self.received = 0
        return counts


Told = Callable[[CountingTransport], None]


class Counting(asyncio.BaseProtocol):
    """Base class of protocols that count bytes and forward events to the protocol `inner`.

    `entered` and `left` are called with the `CountingTransport` when the connection begins and ends.
    """

    def __init__(self, inner: Any, entered: Told, left: Told) -> None:
        self._inner = inner
        self._entered, self._left = entered, left
        self._transport: CountingTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wrap the transport of the new connection, and forward the event."""
        self._transport = CountingTransport(transport, RequestTimeLimit())  # type: ignore[arg-type]
        self._entered(self._transport)
        self._inner.connection_made(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection, and forward the event."""
        if self._transport is not None:
            self._left(self._transport)
        self._inner.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """Forward the end of the client's data."""
        goes_on: bool | None = self._inner.eof_received()
        return goes_on

    def pause_writing(self) -> None:
        """Forward that the send buffer is full."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Forward that the send buffer has space."""
        self._inner.resume_writing()

    def _count(self, count: int) -> None:
        if self._transport is not None:
            self._transport.received += count
            self._transport.pace.count_received(count)


class CountingProtocol(Counting, asyncio.Protocol):
    """Wrapper of a protocol that receives bytes, such as HTTP."""

    def data_received(self, data: bytes) -> None:
        """Count received bytes, and pass them on."""
        self._count(len(data))
        self._inner.data_received(data)


class CountingBufferedProtocol(Counting, asyncio.BufferedProtocol):
    """Wrapper of a protocol with its own receive buffer, such as TLS."""

    def get_buffer(self, sizehint: int) -> Any:
        """Return the inner protocol's buffer."""
        return self._inner.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Count received bytes, and pass them on."""
        self._count(nbytes)
        self._inner.buffer_updated(nbytes)
